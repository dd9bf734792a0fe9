"""What p2pd reports, in the words that people see."""

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.refusals import Code
from spes_p2p.net.p2pd import _explain


def test_a_chain_of_errors_names_the_peer_once() -> None:
    chain = "failed to dial: failed to dial QmPeer: all dials failed\n  * [/ip4/127.0.0.1/tcp/46493] dial backoff"
    explained = _explain("QmPeer", chain)
    assert isinstance(explained, PeerUnreachable)
    assert str(explained) == "QmPeer cannot be dialled: [/ip4/127.0.0.1/tcp/46493] dial backoff"
    chain += "".join(f"\n  * [/ip4/127.0.0.1/tcp/{port}] connection refused" for port in (1, 2, 3))
    earlier = str(_explain("QmPeer", chain))  # a peer that was started again had other ports
    assert earlier == "QmPeer cannot be dialled: [/ip4/127.0.0.1/tcp/46493] dial backoff (nor at 3 more)"
    assert str(_explain("QmPeer", "routing:\n not found")) == "QmPeer: routing: not found"
    refused = _explain("QmPeer", "failed to negotiate protocol: protocols not supported: [/spes/2/round]")
    assert isinstance(refused, Refused)
    assert refused.code is Code.UNKNOWN_METHOD
    assert refused.detail == "QmPeer does not serve this"

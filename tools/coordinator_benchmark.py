"""./tools/bench coordinator: what the records of one round take in a coordinator's memory, by the number of its members, and
the bytes of each for one member: as hashed and signed, and on the wire.

Announcements and reports as they come, signed, and as they are read; the proposal, the plan that follows from it, and both
packed. Peer ids and signatures are as long as real ones, the model has eight experts. Not counted: streams, the base, the parts
of the model, and the records of the last rounds, of which a peer keeps some plans and 32 commits.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from hashlib import sha256

from bench_json import parser_of, tell
from round_contenders import EXPERTS, our_campaign

from spes_p2p.consensus.signed import sign
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.compact import compressed, shortened
from spes_p2p.messages.consensus import Ballot, Signed
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.rounds import Announcement, Evidence, Proposal, Staged
from spes_p2p.rounds.proposal import derive_plan
from spes_p2p.testing.simulate.swarm import VirtualSwarm
from spes_p2p.testing.simulated_identity import SimulatedIdentity

PEERS = (4, 16, 64, 256, 1000)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, help="members (default 4 16 64 256 1000)")
    arguments = parser.parse_args()
    megabytes_of_round(min(arguments.peers))  # fills caches that live as long as the process
    tell({str(peers): megabytes_of_round(peers) | bytes_per_member(peers) for peers in arguments.peers}, arguments.json)


def megabytes_of_round(peers: int) -> dict[str, float]:
    """Return what a round takes in memory and packed, in MB."""
    swarm = VirtualSwarm(our_campaign({"codec": "int8", "sync": {}}))
    commit, rules = swarm.genesis, swarm.rules
    identities = sorted((SimulatedIdentity(_name(i)) for i in range(peers)), key=lambda each: each.peer_id)
    coordinator = commit.electorate[0]
    announcements = [pack(sign(_announcement(swarm), each)) for each in identities]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    came = tuple(unpack(Signed, each) for each in announcements)
    proposal = Proposal(0, commit.id, Ballot(0, coordinator), came)
    plan = derive_plan(proposal, [commit], rules, identities[0], {})
    staged = Staged(plan.proposal.id, (b"0" * 32,), 0, (), b"0" * 32, (b"0" * 32,) * min(peers, 64), b"", "0" * 32)
    reports = tuple(unpack(Signed, pack(sign(staged, each))) for each in identities)
    packed = pack(proposal), pack(Evidence(reports))
    held = tracemalloc.get_traced_memory()[0] - before
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert len(plan.members) == peers
    return {"held": round(held / 1e6, 3), "peak": round(peak / 1e6, 3), "packed": round(sum(map(len, packed)) / 1e6, 3)}


def bytes_per_member(peers: int) -> dict[str, tuple[int, int]]:
    """Return the bytes of records by kind: as hashed and signed, and after those of the round before on the wire."""
    swarm = VirtualSwarm(our_campaign({"codec": "int8", "sync": {}}))
    identities = sorted((SimulatedIdentity(_name(i)) for i in range(peers)), key=lambda each: each.peer_id)
    coordinator, sizes = swarm.genesis.electorate[0], {}
    last, this = (
        Proposal(number, _digest(number), Ballot(0, coordinator), tuple(
            sign(_next(_announcement(swarm), number, i), each) for i, each in enumerate(identities)
        )) for number in (1, 2)
    )
    plan, known = sha256(pack(this)).hexdigest(), pack(this)
    staged = Staged(plan, (b"0" * 32,), 0, (), b"0" * 32, (), b"", "")
    reports = [sign(replace(staged, incarnation=_digest(i)[:32]), each) for i, each in enumerate(identities)]
    evidence = pack(Evidence(tuple(reports)))
    sizes["proposal"] = len(known) // peers, len(compressed(known, pack(last))) // peers
    sizes["evidence"] = len(evidence) // peers, len(compressed(evidence, known)) // peers
    before, after, report = pack(last.announcements[0]), pack(this.announcements[0]), pack(reports[0])
    sizes["announcement"] = len(after), len(shortened(Kind.MESSAGE, after, before + this.parent.encode() + b"0" * 64).body)
    sizes["report"] = len(report), len(shortened(Kind.REPORT, report, after + plan.encode()).body)
    return sizes


def _next(announcement: Announcement, number: int, member: int) -> Announcement:
    """Return an announcement as a member makes it in this round after one of work."""
    tokens = 10_000 * number + member
    return replace(
        announcement, round=number, commit=_digest(number), base_digest=_digest(number), tokens=tokens,
        routed=(tokens,) * EXPERTS, tokens_per_second=1000.0 + member / number, bandwidth=1e6 + member / number,
    )


def _digest(number: int) -> str:
    return sha256(bytes(number)).hexdigest()


def _name(number: int) -> str:
    """Return a name as long as a real peer's id."""
    return "Qm" + sha256(str(number).encode()).hexdigest()[:44]


def _announcement(swarm: VirtualSwarm) -> Announcement:
    return Announcement(
        swarm.campaign.hash, 10, 0, 0, 0.0, swarm.genesis.id, swarm.genesis.base_digest, 0, (0,) * EXPERTS, 1, 1000.0, 1e6, 0.0,
        None, (),
    )


if __name__ == "__main__":
    main()

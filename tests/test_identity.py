"""A signature proves which peer made it, and the identity file is the one that libp2p reads."""

from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from network_swarm import call

from spes_p2p.errors import UserError
from spes_p2p.net.identity import SESSION_KEY_BYTES, SESSION_SIGNATURE_BYTES, RSAIdentity
from spes_p2p.testing.simulated_identity import PROOF_BYTES, SIGNATURE_BYTES, SimulatedIdentity


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> RSAIdentity:
    return RSAIdentity(tmp_path_factory.mktemp("alice") / "identity")


@pytest.fixture(scope="module")
def bob(tmp_path_factory: pytest.TempPathFactory) -> RSAIdentity:
    return RSAIdentity(tmp_path_factory.mktemp("bob") / "identity")


def test_peer_id_is_the_one_that_hivemind_derives_from_the_file(alice: RSAIdentity) -> None:
    assert alice.peer_id == PeerID.from_identity(alice.path.read_bytes()).to_base58()


def test_identity_survives_a_restart_and_is_private(alice: RSAIdentity) -> None:
    assert RSAIdentity(alice.path).peer_id == alice.peer_id
    assert alice.path.stat().st_mode & 0o077 == 0
    assert [file.name for file in alice.path.parent.iterdir()] == ["identity"]


def test_everybody_can_verify_who_signed(alice: RSAIdentity, bob: RSAIdentity) -> None:
    signature = alice.sign(b"commit 7")
    assert bob.verify(alice.peer_id, b"commit 7", signature)
    assert not bob.verify(alice.peer_id, b"commit 8", signature)
    assert not bob.verify(bob.peer_id, b"commit 7", signature)


def test_a_key_of_somebody_else_inside_the_signature_does_not_help(alice: RSAIdentity, bob: RSAIdentity) -> None:
    by_alice, by_bob = alice.sign(b"x"), bob.sign(b"x")
    key_end = 2 + int.from_bytes(by_alice[:2], "big")
    for end in (key_end, len(by_alice) - SESSION_KEY_BYTES - SESSION_SIGNATURE_BYTES, len(by_alice) - SESSION_SIGNATURE_BYTES):
        assert not alice.verify(alice.peer_id, b"x", by_alice[:end] + by_bob[end:])


def test_each_process_has_its_own_key_and_signatures_of_all_of_them_hold(alice: RSAIdentity) -> None:
    later = RSAIdentity(alice.path)
    signatures = [alice.sign(b"x"), alice.sign(b"y"), later.sign(b"x")]
    proofs = [signature[:-SESSION_SIGNATURE_BYTES] for signature in signatures]
    assert proofs[0] == proofs[1] != proofs[2]
    assert all(alice.verify(alice.peer_id, each, by) for each, by in zip((b"x", b"y", b"x"), signatures, strict=True))
    assert [len(proofs[0]), SESSION_SIGNATURE_BYTES] == [PROOF_BYTES, SIGNATURE_BYTES]


def test_a_damaged_signature_is_false_and_no_error(alice: RSAIdentity) -> None:
    signature = alice.sign(b"x")
    for position in (0, 1, 2, 40, 400, len(signature) - 70, len(signature) - 1):
        damaged = signature[:position] + bytes([signature[position] ^ 1]) + signature[position + 1 :]
        assert not alice.verify(alice.peer_id, b"x", damaged)
    for length in (0, 1, 2, 100, len(signature) - 1):
        assert not alice.verify(alice.peer_id, b"x", signature[:length])


def test_a_file_that_is_no_identity_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.write_bytes(b"hello")
    with pytest.raises(UserError, match=str(path)):
        RSAIdentity(path)
    assert path.read_bytes() == b"hello"


def test_simulated_identities_differ_by_name() -> None:
    alice, bob = SimulatedIdentity("alice"), SimulatedIdentity("bob")
    assert bob.verify("alice", b"x", alice.sign(b"x"))
    assert not bob.verify("bob", b"x", alice.sign(b"x"))
    assert not bob.verify("alice", b"y", alice.sign(b"x"))


def test_the_command_says_when_it_makes_a_key(tmp_path: Path) -> None:
    key = tmp_path / "my.key"
    made, found = (call("identity", "--identity", str(key)) for _ in range(2))
    assert made.stderr == f"{key}: made a new key; it is this peer's identity, so keep it\n"
    assert (found.stderr, found.stdout) == ("", made.stdout)

"""A signature proves which peer made it, the identity file is the one that libp2p reads, and a bootstrap peer keeps its own."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import PeerID
from network_swarm import call
from recorded_run import run_dir

from spes_p2p.config.campaign import make_peer_config
from spes_p2p.errors import UserError
from spes_p2p.net.identity import SESSION_KEY_BYTES, SESSION_SIGNATURE_BYTES, RSAIdentity, is_usual
from spes_p2p.session.run_dir import ADDRESS_FILE
from spes_p2p.session.same_identity import require_same_identity
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


def test_a_proof_by_a_key_that_is_slow_to_check_is_none(alice: RSAIdentity) -> None:
    """Keys with long exponents take 50 times as long."""
    numbers = alice.private_key.public_key().public_numbers()
    assert is_usual(numbers.public_key())
    assert not is_usual(rsa.RSAPublicNumbers(numbers.n - 2, numbers.n).public_key())


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


@pytest.mark.parametrize("begins", [True, False])
def test_a_bootstrap_peer_goes_on_with_its_own_key_only(tmp_path: Path, begins: bool) -> None:
    folder, typo, another = run_dir(tmp_path / "run", []), tmp_path / "typo.key", RSAIdentity(tmp_path / "another.key")
    own = RSAIdentity(folder / "identity.key")
    (folder / ADDRESS_FILE).write_text(f"/ip4/203.0.113.7/tcp/31337/p2p/{own.peer_id}\n")
    require_same_identity(make_peer_config(run_dir=folder), begins)
    require_same_identity(make_peer_config(run_dir=folder, identity=own.path.rename(tmp_path / "own.key")), begins)
    served = f"but {folder} was served by {own.peer_id} before; give that peer's key with --identity, or another --run-dir"
    for path, given in ((None, "no such file"), (typo, "no such file"), (another.path, f"the key of {another.peer_id}")):
        with pytest.raises(UserError) as refused:
            require_same_identity(make_peer_config(run_dir=folder, identity=path), begins)
        assert str(refused.value) == f"{path or own.path}: {given}, {served}"
    another.path.write_bytes(b"damaged")
    advice = f"restore your copy: {folder} serves with the key of {own.peer_id} only; without one, give a new --run-dir, and"
    with pytest.raises(UserError, match=advice):
        require_same_identity(make_peer_config(run_dir=folder, identity=another.path), begins)
    for damaged in (b"/ip4/203.0.113.7/tcp/31337/p2p/Qm", b"\xff", b""):
        (folder / ADDRESS_FILE).write_bytes(damaged)
        require_same_identity(make_peer_config(run_dir=folder, identity=tmp_path / "own.key"), begins)
    (folder / ADDRESS_FILE).unlink()
    (folder / ADDRESS_FILE).mkdir()
    require_same_identity(make_peer_config(run_dir=folder, identity=tmp_path / "own.key"), begins)
    with pytest.raises(UserError, match=r"typo.key: no such file, but .* was served by another peer before"):
        require_same_identity(make_peer_config(run_dir=folder, identity=typo), begins)


def test_a_campaign_begins_with_a_new_key_and_a_name_that_was_given_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for begins in (True, False):
        require_same_identity(make_peer_config(run_dir=tmp_path), begins)
    assert caplog.messages == []
    named = make_peer_config(run_dir=tmp_path, identity=tmp_path / "my.key")
    require_same_identity(named, begins=True)
    assert caplog.messages == [f"{tmp_path / 'my.key'}: no such file; making a new key, that of the campaign's owner"]
    with pytest.raises(UserError, match=r"--identity '.*my.key': no such file; give this peer's key, or make one"):
        require_same_identity(named, begins=False)

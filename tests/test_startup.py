"""What a command or a helper does not use is not imported: libraries take seconds and hundreds of megabytes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import base58
import psutil
import pytest
from network_swarm import COMMAND_TIMEOUT_S, ENVIRONMENT, ROOT, LocalPeers

from spes_p2p.campaign.files import read_campaign
from spes_p2p.errors import Broken, UserError
from spes_p2p.net.light_hivemind import UNUSED
from spes_p2p.session.apart import Progress, run_apart, run_apart_telling

HEAVY = {"torch", "transformers", "scipy", "pyarrow", "matplotlib"}
FOR_STATUS = {*HEAVY, "numpy", "tokenizers", "yaml", "netaddr", "spes_p2p.config.campaign", "spes_p2p.peer.node",
              "spes_p2p.messages.rounds", "spes_p2p.observe.events"}
TELL_IMPORTED = "import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"


def imported_by(program: str) -> set[str]:
    """Modules that a new process has imported at the end of this program."""
    ended = subprocess.run(
        [sys.executable, "-c", TELL_IMPORTED + program], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=COMMAND_TIMEOUT_S, check=True,
    )
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        ("spes_p2p.cli.volunteer", FOR_STATUS | {"hivemind", "pydantic", "rich.console"}),
        ("spes_p2p.client.status", FOR_STATUS | {"hivemind.p2p"}),
        ("spes_p2p.session.run", HEAVY | {"aiohttp", "fsspec"}),
        ("spes_p2p.client.report", HEAVY),
        ("spes_p2p.client.export", HEAVY),
        ("spes_p2p.client.owner", HEAVY | {"numpy"}),
        ("spes_p2p.campaign.lines", HEAVY),
        ("spes_p2p.client.doctor", HEAVY - {"torch"}),
        ("spes_p2p.campaign.init", HEAVY - {"pyarrow"}),
    ],
)
def test_importing_this_imports_nothing_heavy(module: str, unused: set[str]) -> None:
    imported = imported_by(f"import {module}")
    assert module in imported
    assert not unused & imported


def test_a_command_is_built_without_the_others() -> None:
    imported = imported_by("from spes_p2p.cli import make_app; make_app('status')")
    assert {name for name in imported if name.startswith("spes_p2p.cli.")} == {
        "spes_p2p.cli.watching", "spes_p2p.cli.options", "spes_p2p.cli.terminal",
    }


def test_plan_computes_the_sizes_of_a_known_family_without_torch() -> None:
    plan = ["spes-p2p", "plan", "--config", "configs/demo.yaml", "--memory", "8GiB", "--json"]
    imported = imported_by(f"import sys; sys.argv = {plan}; from spes_p2p.cli import main; main()")
    assert "spes_p2p.campaign.planner" in imported
    assert not HEAVY & imported


def test_what_hivemind_gets_a_placeholder_for_is_used_by_nothing_that_we_import() -> None:
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    names = re.compile("|".join(UNUSED.values()))
    users = {
        str(path.relative_to(package)) for folder in ("p2p", "dht", "utils") for path in package.glob(f"{folder}/**/*.py")
        if names.search(path.read_text())
    }
    assert users == {"dht/dht.py", "utils/__init__.py", "utils/mpfuture.py", "utils/tensor_descr.py"}


def test_ip_addresses_in_multiaddrs_are_converted_as_by_netaddr() -> None:
    program = """
import spes_p2p.net, sys
from hivemind.utils.multiaddr import Multiaddr
ip4, ip6 = Multiaddr("/ip4/203.0.113.7/tcp/1"), Multiaddr("/ip6/2001:db8::7/tcp/1")
assert ip4.to_bytes().hex() == "04cb007107060001" and str(Multiaddr(ip4.to_bytes())) == "/ip4/203.0.113.7/tcp/1"
assert ip6.to_bytes().hex() == "2920010db8000000000000000000000007060001" and str(Multiaddr(ip6.to_bytes())) == str(ip6)
try: Multiaddr("/ip4/203.0.113/tcp/1")
except ValueError: print("refused")
"""
    imported = imported_by(program)
    assert "refused" in imported
    assert "netaddr" not in imported


def test_peer_ids_in_multiaddrs_are_converted_as_by_cid() -> None:
    ids = ["QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"]
    hashes = map(base58.b58decode, ids)
    packed = [f"a503{len(each) + 2:02x}0172{each.hex()}" for each in hashes]
    program = f"""
import spes_p2p.net, sys
from hivemind.utils.multiaddr import Multiaddr
for text in {ids}:
    address = Multiaddr(f"/p2p/{{text}}")
    assert str(Multiaddr(address.to_bytes())) == f"/p2p/{{text}}"
    print(address.to_bytes().hex())
"""
    imported = imported_by(program)
    assert set(packed) <= imported, imported
    assert not {"cid", "multibase", "multicodec"} & imported
    in_another_notation = """
import spes_p2p.net
from hivemind.utils.multiaddr import Multiaddr
address = Multiaddr("/p2p/bafzbeie5745rpv2m6tjyuugywy4d5ewrqgqqhfnf445he3omzpjbx5xqxe")
assert Multiaddr(address.to_bytes()) == address
print(address)
try: Multiaddr("/p2p/Qm1")
except ValueError: print("refused")
"""
    said = imported_by(in_another_notation)
    assert {"refused", "/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"} <= said
    assert "cid" in said


@pytest.mark.network
def test_all_of_hivemind_is_there_for_a_program_that_imports_it_first() -> None:
    assert {"hivemind.averaging", "torch"} <= imported_by("import hivemind, spes_p2p.net.libp2p; hivemind.DHT")


@pytest.mark.network
def test_a_bootstrap_peer_does_its_part_of_a_round_without_torch_and_its_daemon_with_less_memory(
    campaign: Path, tmp_path: Path
) -> None:
    with LocalPeers(tmp_path) as peers:
        bootstrap = peers.bootstrap(campaign)
        peers.join("one", bootstrap.address)
        peers.join("two", bootstrap.address)
        peers.wait_for_round(2)
        loaded = [Path(f"/proc/{peer.process.pid}/maps").read_text() for peer in (bootstrap, peers["one"])]
        assert [bool(re.search("/torch/lib/", maps)) for maps in loaded] == [False, True]
        daemons = [psutil.Process(peer.process.pid).children()[0] for peer in (bootstrap, peers["one"])]
        found = [daemon.environ().get("GOGC") for daemon in daemons]
        assert found == ["50", psutil.Process(peers["one"].process.pid).environ().get("GOGC")]
        memory = sum(psutil.Process(pid).memory_info().rss for pid in (bootstrap.process.pid, daemons[0].pid))
        assert memory < 250e6  # what the demo's model takes, which is larger than this one
        status = f"sys.argv = ['spes-p2p', 'status', {bootstrap.address!r}]; from spes_p2p.cli import main; main()"
        imported = imported_by(status)
    assert "spes_p2p.client.status" in imported
    assert not (FOR_STATUS - {"spes_p2p.config.campaign"}) & imported  # it checks statuses by the campaign's rules


def test_what_runs_apart_gives_its_result_and_its_errors(tmp_path: Path) -> None:
    assert run_apart(os.path.join, "a", "b") == "a/b"
    assert run_apart(os.getpid) != os.getpid()
    assert run_apart(print, "a library's output") is None
    with pytest.raises(UserError, match=r"campaign\.yaml"):
        run_apart(read_campaign, tmp_path / "campaign.yaml")
    with pytest.raises(IsADirectoryError) as refused:
        run_apart(Path.read_bytes, tmp_path)
    assert refused.value.filename == str(tmp_path)
    with pytest.raises(Broken, match="_exit ended with code 3"):
        run_apart(os._exit, 3)


def count_to(tell: Progress, number: int) -> int:
    for done in range(number):
        tell(done, number)
    return number


def end_after_telling(tell: Progress) -> None:
    tell(1, 2)
    os._exit(3)


def test_what_runs_apart_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, Path(__file__).parent))))  # where this module is found
    told = list[tuple[int, int]]()
    assert run_apart_telling(lambda *progress: told.append(progress), count_to, 3) == 3
    assert told == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(Broken, match="end_after_telling ended with code 3"):
        run_apart_telling(lambda done, total: None, end_after_telling)

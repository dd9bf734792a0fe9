"""The docs: every command in them is one that the program takes, the pages that walk through a campaign are run, links lead
somewhere, generated pages are current."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from network_swarm import LOOPBACK, ROOT, LocalPeer, LocalPeers, call, free_port
from sample_text import TEXT

from spes_p2p.cli import make_app
from spes_p2p.config.addresses import EXAMPLE_ADDRESS
from spes_p2p.messages import methods
from spes_p2p.messages.content import ContentKind

PAGES = sorted([*ROOT.glob("[!C]*.md"), ROOT / "CONTRIBUTING.md", ROOT / "bootstrap/README.md", *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(spes-p2p [^`]+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PLACEHOLDERS = {"N": "4", "ADDRESS": EXAMPLE_ADDRESS, "...": EXAMPLE_ADDRESS}
OF_A_RUNNING_TRAINER = ("pause", "resume", "me")
SHORT_ID = re.compile(r"^/ip4/.*/p2p/Qm(\.\.\.|X)$")


PROGRAM: Any = typer.main.get_command(make_app())
NEEDS_THE_HUB = {"--push-to", "arc_easy"}
"""Commands with these are run on local data, and against a Hub of our own, by test_evaluate.py and test_model_card.py."""


def fenced_commands(page: Path) -> list[list[str]]:
    """Command lines of the program in fenced blocks; a line may begin with a prompt and may be continued."""
    shell = [block for language, block in FENCED.findall(page.read_text()) if language in ("", "sh")]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    plain = [re.sub(r"^\$ ", "", line.strip()) for line in lines]
    return [shlex.split(line, comments=True) for line in plain if line.startswith("spes-p2p ")]


def inline_commands(page: Path) -> list[list[str]]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(re.sub(r"[\[\]]", "", text)) for text in INLINE.findall(prose)]


def commands(page: Path) -> list[list[str]]:
    return [*fenced_commands(page), *inline_commands(page)]


COMMANDS = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)}") for page in PAGES for words in commands(page)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_the_program_takes_every_command_of_the_docs(words: list[str]) -> None:
    _, *arguments = [PLACEHOLDERS.get(word, SHORT_ID.sub(EXAMPLE_ADDRESS, word)) for word in words]
    command = PROGRAM
    while hasattr(command, "commands") and arguments:
        name = arguments.pop(0)
        assert name in command.commands
        command = command.commands[name]
    if arguments and "--help" not in arguments:
        command.make_context(name, arguments)


def test_commands_are_found() -> None:
    found = {words[1] for page in PAGES for words in commands(page)}
    assert found >= {"init", "bootstrap", "join", "doctor", "status", "export", "plan"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_tables_end_on_their_line(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    assert [line for line in text.splitlines() if line.startswith("|") and not line.rstrip().endswith("|")] == []


def test_the_protocol_page_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = runpy.run_path(str(ROOT / "tools/protocol_reference"))
    assert (ROOT / "docs/protocol.md").read_text() == tool["page"](), "run: python tools/protocol_reference"


def test_the_protocol_page_has_every_method_that_a_peer_serves() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "spes_p2p").rglob("*.py"))
    names = set(re.findall(r"\.serve\(([A-Z_]+),", sources)) | set(re.findall(r"([A-Z_]+)[:,] self\.[\w.]*on_", sources))
    assert {getattr(methods, name) for name in names} | set(get_args(ContentKind)) == set(methods.METHODS)


# Walking through ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the docs expect it: the repository's files, and some text of one's own."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "text.jsonl").symlink_to(TEXT / "train/wordnet.jsonl")
    (tmp_path / "held_out.jsonl").symlink_to(TEXT / "held_out/wordnet.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_and_expect_success(words: list[str]) -> str:
    ended = call(*words[1:])
    assert ended.code == 0, f"{shlex.join(words)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.mark.slow
@pytest.mark.network
def test_the_quick_start_works(clone: Path) -> None:
    for words in fenced_commands(ROOT / "docs/quickstart.md"):
        run_and_expect_success(words)
    assert (clone / "runs/first/checkpoint/config.json").is_file()


class Walk:
    """Runs the commands of a campaign's owner and its volunteers, on loopback in place of the docs' public addresses."""

    def __init__(self, peers: LocalPeers):
        self.peers = peers
        self.ports = {"31337": str(free_port()), "31338": str(free_port())}
        self.address = ""

    def run(self, words: list[str]) -> None:
        words = [self._local(word) for word in words]
        if words[1] == "directory":
            words = list(dict.fromkeys(words))  # there is one campaign here
        if words[1] == "bootstrap":
            name = Path(words[words.index("--run-dir") + 1]).name
            peer = self._start(name, words, "spes-p2p join /ip4/127.0.0.1/")
            self.address = self.address or peer.log.split("spes-p2p join ")[1].split()[0]
        elif words[1] in ("dashboard", "directory"):
            self._look(words, f"{words[1]} on http")
        elif "--watch" in words:
            self._look(words, "round ")
        elif words[1] == "join":
            for name in ("volunteer-0", "volunteer-1"):
                self._start(name, [*words, "--listen", LOOPBACK], "joined campaign")
        else:
            run_and_expect_success(words)

    def _look(self, words: list[str], sign: str) -> None:
        """Run what only ends when it is told to, until it shows what it is for."""
        peer = self.peers.run("looking", words[1:], cwd=Path(os.getcwd()), run_dir_option=False)
        self.peers.wait(lambda: sign in peer.log or not peer.is_running, 120, f"{shlex.join(words)} says: {sign}")
        assert sign in peer.log, peer.log
        self.peers.kill("looking")

    def _local(self, word: str) -> str:
        word = word.strip("[]")
        word = self.address if word == "ADDRESS" else re.sub(r"/ip4/[\d.]+/", "/ip4/127.0.0.1/", word)
        word = re.sub(r"313\d\d", lambda found: self.ports[found[0]], word)
        return "0" if word in ("9400", "8700") else word

    def _start(self, name: str, words: list[str], sign: str) -> LocalPeer:
        peer = self.peers.run(name, words[1:], cwd=Path(os.getcwd()))
        self.peers.wait(lambda: sign in peer.log or not peer.is_running, 90, f"{name} says: {sign}")
        assert peer.is_running, peer.log
        return peer


@pytest.fixture
def walk(clone: Path) -> Iterator[Walk]:
    with LocalPeers(clone / "runs") as peers:
        (clone / "runs").mkdir()
        yield Walk(peers)


@pytest.mark.slow
@pytest.mark.network
def test_a_campaign_is_run_and_joined_as_the_docs_say(walk: Walk, clone: Path) -> None:
    owner, volunteer = (fenced_commands(ROOT / f"docs/{page}.md") for page in ("campaign", "join"))
    before_export = [words for words in owner if words[1] not in ("export", "evaluate", "generate")]
    own = [words for words in volunteer if words[1] in OF_A_RUNNING_TRAINER]
    joining = [words for words in volunteer if words[1] in ("doctor", "join") and "--devices" not in words]
    for words in (*before_export, *joining):
        walk.run(words)
    volunteers = [walk.peers[name] for name in ("volunteer-0", "volunteer-1")]
    walk.peers.wait_for_round(1, 180, [*volunteers, walk.peers["bootstrap"]])
    for words in own:
        run_and_expect_success([word.replace("runs/peer", str(volunteers[0].run_dir)) for word in words])
    for words in fenced_commands(ROOT / "docs/dashboard.md"):
        if not NEEDS_THE_HUB & set(words):
            walk.run([word.replace("runs/peer", str(volunteers[0].run_dir)) for word in words])
    (clone / "checkpoint").rename(clone / "from_the_swarm")
    walk.peers.terminate("bootstrap")
    for words in owner:
        if words[1] in ("export", "generate"):
            walk.run(words)
    assert (clone / "checkpoint/config.json").is_file()


SIMULATIONS = [words for words in fenced_commands(ROOT / "docs/reliability.md") if "--virtual" in words]


@pytest.mark.slow
@pytest.mark.parametrize("words", SIMULATIONS, ids=shlex.join)
def test_the_simulations_of_the_docs_run(words: list[str], clone: Path) -> None:
    """With fewer seeds and rounds than the page says."""
    (scenario,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE | re.DOTALL)
    (clone / "scenario.yaml").write_text(scenario)
    cut = {"--seeds": "2", "--rounds": "3"}
    words = [cut.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    report = run_and_expect_success(words)
    assert "round" in report
    assert "--event-log" not in words or (clone / words[words.index("--event-log") + 1]).stat().st_size > 0

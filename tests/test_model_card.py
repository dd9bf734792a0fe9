"""What an exported checkpoint says of itself, and its way to the Hub."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from aiohttp import web
from network_swarm import call
from synthetic_swarm import synthetic_swarm

from spes_p2p.client.export import push_to_hub
from spes_p2p.client.model_card import CARD_FILE, FACTS_FILE, Origin, card_files, origin_of
from spes_p2p.config.campaign import Campaign, StartConfig, load_campaign_config
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import Contribution, Named
from spes_p2p.observe.events import BEFORE_TRAINING

CONFIG = load_campaign_config(Path(__file__).parents[1] / "configs/test.yaml")
CAMPAIGN = Campaign(config=CONFIG, manifest_sha256="a" * 64, validation_manifest_sha256=None, tokenizer_sha256="b" * 64)


def origin(rounds: int = 12) -> Origin:
    swarm = synthetic_swarm(3, 4, rounds)
    return origin_of(CAMPAIGN, rounds, "d" * 64, swarm.records)


def test_the_card_and_the_facts_say_the_same() -> None:
    files = card_files(origin())
    card, facts = files[CARD_FILE], json.loads(files[FACTS_FILE])
    assert (facts["round"], facts["digest"], facts["config_hash"]) == (12, "d" * 64, CAMPAIGN.hash)
    assert (facts["held_out_round"], facts["contributions_up_to_round"]) == (10, 12)
    for text in (CAMPAIGN.hash, "d" * 64, "| round | 12 of 8 |", str(facts["tokens"]), f"{facts['training_loss']:.4f}",
                 f"{facts['held_out_loss']:.4f} nats per token, round 10", "| peers that contributed | 3 |"):
        assert text in card
    for each in facts["contributions"]:
        assert f"| `{each['peer']}` |  |  | {each['tokens']} | 33.3 % | {each['expert_steps']} |" in card
    assert facts["config"] == json.loads(CONFIG.model_dump_json())


def test_the_card_names_what_the_owner_ordered_up_to_its_round() -> None:
    ordered = {5: "paused", 6: "", 8: "rolled back to round 4", 9: "rolled back to round 4", 11: "stopped"}
    swarm = synthetic_swarm(3, 4, 12)
    records = [replace(record, control=ordered.get(record.round, "")) for record in swarm.records]
    files = card_files(origin_of(CAMPAIGN, 9, "d" * 64, records))
    orders = [(each["from_round"], each["order"]) for each in json.loads(files[FACTS_FILE])["orders"]]
    assert orders == [(5, "paused"), (6, ""), (8, "rolled back to round 4")]
    for line in ("- round 5: paused", "- round 6: resumed", "- round 8: rolled back to round 4", "| round | 9 |"):
        assert line in files[CARD_FILE].splitlines()
    assert "owner" not in card_files(origin())[CARD_FILE]


def test_the_card_says_that_contributions_are_not_all_where_records_are_missing() -> None:
    records = synthetic_swarm(3, 4, 12).records
    first = sum(record.tokens for record in records[:5])
    card = card_files(origin_of(CAMPAIGN, 12, "d" * 64, records[5:]))[CARD_FILE]
    assert f"Rounds with {first:,} tokens are left out" in card
    assert "left out" not in card_files(origin())[CARD_FILE]


def test_base_0_is_of_round_0() -> None:
    assert "| round | 0 of 8 |" in card_files(origin_of(CAMPAIGN, BEFORE_TRAINING, "d" * 64, ()))[CARD_FILE]


def test_the_front_matter_is_what_the_hub_reads() -> None:
    _, front, _ = card_files(origin())[CARD_FILE].split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"


@pytest.mark.parametrize(("checkpoint", "name"), [
    ("Qwen/Qwen3-1.7B@0123456789abcdef0123456789abcdef01234567", "Qwen/Qwen3-1.7B"), ("../smollm2", None), ("models/own", None),
    ("../smollm2@2", None), ("Qwen/Qwen3-1.7B\nlicense: mit@1", None), (None, None),
])
def test_the_hub_is_told_which_of_its_models_this_one_was_made_from(checkpoint: str | None, name: str | None) -> None:
    start = None if checkpoint is None else StartConfig(checkpoint=checkpoint)
    made = origin()
    config = CONFIG.model_copy(update={"start": start})
    card = card_files(replace(made, campaign=CAMPAIGN.model_copy(update={"config": config})))[CARD_FILE]
    assert yaml.safe_load(card.split("---\n", 2)[1]).get("base_model") == name


def test_later_rounds_are_not_this_bases_and_who_did_most_stands_first() -> None:
    half = (Contribution("a", 5, 1), Contribution("b", 15, 2), Contribution("c", 10, 3))
    records = [
        replace(record, contributions=half if record.round in (3, 7) else half[:1] * (record.round > 7))
        for record in synthetic_swarm(3, 4, 12).records
    ]
    made = origin_of(CAMPAIGN, 7, "d" * 64, records)
    assert made.held_out is not None
    assert made.held_out[0] == 5
    card = card_files(made)[CARD_FILE]
    assert card.index("| 30 | 50.0 % |") < card.index("| 20 | 33.3 % |") < card.index("| 10 | 16.7 % |")
    assert "team | peers" not in card


def test_peers_stand_there_under_the_names_and_teams_that_they_gave_last() -> None:
    work = (Contribution("a", 5, 1), Contribution("b", 15, 2), Contribution("c", 10, 3))
    names = {2: (Named("a", "Ada", "owls"), Named("b", "Bob", "")), 4: (Named("a", "Ada L.", "Owls"), Named("c", "", "OWLS"))}
    records = [replace(record, contributions=work, names=names.get(record.round, ()))
               for record in synthetic_swarm(3, 4, 5).records[1:5]]
    files = card_files(origin_of(CAMPAIGN, 4, "d" * 64, records))
    rows = [row for row in files[CARD_FILE].splitlines() if row.startswith("| `") or "OWLS" in row or "wls" in row]
    assert rows == [
        "| `b` | `Bob` |  | 60 | 50.0 % | 8 |",
        "| `c` |  | `OWLS` | 40 | 33.3 % | 12 |",
        "| `a` | `Ada L.` | `Owls` | 20 | 16.7 % | 4 |",
        "| `OWLS` | 2 | 60 | 50.0 % |",
    ]
    assert json.loads(files[FACTS_FILE])["names"]["a"] == {"peer": "a", "name": "Ada L.", "team": "Owls"}


def test_no_name_of_a_peer_is_markdown() -> None:
    """Markdown makes a link of the first and sets the second in bold."""
    named = (Named("a", "www.example.org", "__init__"),)
    records = [replace(synthetic_swarm(1, 1, 1).records[1], contributions=(Contribution("a", 5, 1),), names=named)]
    card = card_files(origin_of(CAMPAIGN, 1, "d" * 64, records))[CARD_FILE]
    assert card.count("`www.example.org`") == card.count("www.example.org") == 1
    assert card.count("`__init__`") == card.count("__init__") == 2


def test_what_nobody_remembers_is_said_to_be_unknown() -> None:
    files = card_files(origin_of(CAMPAIGN, 3, "d" * 64, []))
    assert json.loads(files[FACTS_FILE])["tokens"] is None
    assert "| tokens | unknown |" in files[CARD_FILE]
    assert "No queried peer has a record of the contributions." in files[CARD_FILE]


# The Hub -----------------------------------------------------------------------------------------------------------------


class LocalHub:
    """As much of the Hub's HTTP interface as an upload of small files needs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[str] = []
        self.refuses = False

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/api/repos/create", self._create), web.route("*", "/{rest:.*}", self._other)])
        return app

    async def _create(self, request: web.Request) -> web.Response:
        if self.refuses:
            return self._unknown()
        body = await request.json()
        self.created.append(f"{body.get('organization') or 'me'}/{body['name']}")
        name = self.created[-1]
        return web.json_response({"url": f"{request.url.origin()}/{name}", "name": name, "id": name})

    def _unknown(self) -> web.Response:
        return web.json_response({"error": "Invalid username or password."}, status=401)

    async def _other(self, request: web.Request) -> web.Response:
        if self.refuses:
            return self._unknown()
        if "/preupload/" in request.path:
            body = await request.json()
            answers = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in body["files"]]
            return web.json_response({"files": answers})
        if "/commit/" in request.path:
            for line in (await request.text()).splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"{request.url.origin()}/{self.created[-1]}/commit/1"
            return web.json_response({"commitUrl": url, "commitOid": "1", "pullRequestUrl": None})
        return web.json_response({"id": "me/model", "siblings": [], "sha": "0", "valid": True})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub on loopback, in a thread of its own."""
    made, loop, ready = LocalHub(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> web.AppRunner:
        runner = web.AppRunner(made.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever)
    loop.call_soon(ready.set)
    thread.start()
    ready.wait(10)
    host, port = runner.addresses[0][:2]
    original, endpoint = huggingface_hub.HfApi, f"http://{host}:{port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: original(endpoint=endpoint, token="hf_test"))
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_checkpoint_folder_is_uploaded_as_it_is(hub: LocalHub, tmp_path: Path) -> None:
    for name, text in card_files(origin()).items():
        (tmp_path / name).write_text(text)
    url = push_to_hub(tmp_path, "owners/model", private=True)
    assert hub.created == ["owners/model"]
    assert hub.files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert url.endswith("/owners/model")


def test_a_refusal_of_the_hub_is_one_line(hub: LocalHub, tmp_path: Path) -> None:
    hub.refuses = True
    with pytest.raises(UserError, match=r"^--push-to 'owners/model': .*401.*log in with `hf auth login`$"):
        push_to_hub(tmp_path, "owners/model", private=False)


def test_a_repository_that_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    ended = call("export", "--run-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--push-to", "a/b/c")
    assert (ended.code, ended.stderr) == (2, "error: --push-to 'a/b/c': not a repository name; give OWNER/NAME\n")

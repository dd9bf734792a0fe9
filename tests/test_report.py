"""The report of a run: everything on one page, and no text of a peer in its markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from network_swarm import call
from observed_events import FIRST_COMMIT
from recorded_run import CONFIG, run_dir
from synthetic_swarm import synthetic_swarm

from spes_p2p.client.report import make_report
from spes_p2p.client.report_plots import BLUE, ORANGE
from spes_p2p.config.addresses import EXAMPLE_ADDRESS
from spes_p2p.consensus.output import LOG
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import Contribution
from spes_p2p.observe.events import Controlled, TasksEvaluated
from spes_p2p.observe.history import HISTORY_FILE
from spes_p2p.session.run_dir import ADDRESS_FILE

HARM = "</pre></table><script>alert(1)</script><img src=x onerror=alert(1)>"
RESULTS: dict[str, Any] = {
    "model": "checkpoint", "lm_eval": "0.4.13", "dtype": "float32", "device": "cpu", "groups": {}, "versions": {"piqa": 1},
    "num_fewshot": {"piqa": 0}, "samples": {"piqa": 96}, "tasks": {"piqa": {"sample_len": 96, "acc": 0.5, "acc_stderr": 0.025}},
}
OWN = replace(FIRST_COMMIT, round=13, total_tokens=7_654_321, seconds={"exchange": 2.0},
              contributions=(("QmMe", 1000, 10), ("QmIdle", 0, 0)))


def page_of(folder: Path, evaluations: Sequence[Path] = ()) -> str:
    page, _ = make_report(folder, evaluations)
    return page


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loaded: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href") and str(value)[:1] != "#"]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_has_the_run_and_loads_nothing(tmp_path: Path) -> None:
    records = [replace(record, control="paused" if record.round == 7 else "")
               for record in synthetic_swarm(3, 4, 12).records if record.round != 8]
    by_guard = "paused (by the owner's bootstrap peer: the held-out loss ran away)"
    back = Controlled(8, 2, "paused", f"{by_guard}, rolled back to round 6")
    scores = TasksEvaluated(round=8, scores=(("arc_easy", "acc", 0.25, math.nan),))
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    folder = run_dir(tmp_path / "run", records, scores, back, replace(OWN, total_rounds=20), Controlled(13, 4, "stopped"))
    (folder / ADDRESS_FILE).write_text(f"{EXAMPLE_ADDRESS}\n")
    page = Page(page_of(folder, [tmp_path / "results.json"]))
    held_out = [record for record in records if math.isfinite(record.validation_loss)]
    for text in (
        f"{CONFIG.name}, round 13", "13 of 20 planned, stopped", "7,654,321", "4 contributed; 2 to 3 in a round",
        "1.50 MB sent, 2.00 MB received in 1 round", "parts left out",
        f"{held_out[0].validation_loss:.3f} (round 0) to {held_out[-1].validation_loss:.3f} (round 10)",
        f"{records[1].loss:.3f} (round 1) to {OWN.loss:.3f} (round 13)", records[0].contributions[0].peer, "QmMe",
        "arc_easy acc 0.250", "acc 0.5000 ± 0.0250", "paused", f"sync_steps: {CONFIG.training.sync_steps}",
        f"spes-p2p export --from {EXAMPLE_ADDRESS} --output checkpoint", f"export --run-dir {folder}",
    ):
        assert text in page.text, text
    assert "QmIdle" not in page.text
    _, orders = page.text.split("Orders of the owner")
    assert orders.startswith(f"from roundorder7paused8{by_guard}, rolled back to round 69resumedConfiguration")
    assert page.tags["svg"] == 5
    assert page.loaded == []
    assert "script" not in page.tags


def test_orders_are_named_by_what_they_changed_where_the_journal_says_it(tmp_path: Path) -> None:
    ordered = {3: ("audits of aaaaaa", ""), 5: ("", "no more audits of aaaaaa"), 7: ("bbbbbb banned", "")}
    orders = {number: max((at for at in ordered if at <= number), default=0) for number in range(13)}
    records = [replace(record, control=ordered[orders[record.round]][0] if orders[record.round] else "")
               for record in synthetic_swarm(3, 4, 12).records]
    told = [Controlled(number, number, "running", order, news or order) for number, (order, news) in ordered.items()]
    _, page = Page(page_of(run_dir(tmp_path / "run", records, *told))).text.split("Orders of the owner")
    assert page.startswith("from roundorder3audits of aaaaaa5no more audits of aaaaaa7bbbbbb bannedConfiguration")


def test_curves_of_this_peers_own_have_a_gap_where_it_was_away(tmp_path: Path) -> None:
    """A straight line over the rounds between would be a measurement that nobody made."""
    rounds = [replace(OWN, round=number, sent_bytes=1000 + number) for number in (*range(13, 63), *range(163, 213))]
    page = page_of(run_dir(tmp_path, synthetic_swarm(2, 4, 12).records, *rounds))
    traffic = page.split("Bytes of each round on this peer")[1]
    sent, _ = re.findall(rf'<path d="([^"]+)" clip-path="[^"]*" style="fill: none; stroke: (?:{BLUE}|{ORANGE})', traffic)
    assert sent.count("M") == 2


def test_numbers_are_never_broken_and_ids_may_be(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "run", synthetic_swarm(2, 4, 12).records, OWN)
    page = page_of(folder)
    peer, *numbers = re.findall(r"<td( class=number)?>([^<]*)</td>", page.split("expert-steps</th></tr>")[1])[:6]
    assert peer[0] == ""
    assert peer[1].startswith("Qm")
    assert [cell for kind, cell in numbers if kind] == [cell for _, cell in numbers if cell[:1].isdigit()] != []


def test_text_of_peers_stays_text(tmp_path: Path) -> None:
    records = [
        replace(record, control=HARM, contributions=(Contribution(HARM, 10, 1),), base_digest=HARM)
        for record in synthetic_swarm(2, 4, 3).records
    ]
    scores = TasksEvaluated(round=2, scores=((HARM, HARM, 0.5, 0.1),))
    results = RESULTS | {"tasks": {HARM: {HARM: 0.5}}, "model": HARM}
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = Page(page_of(run_dir(tmp_path / "run", records, scores), [tmp_path / "results.json"]))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count(HARM) >= 6


def test_a_time_that_a_peer_does_not_tell_is_left_open(tmp_path: Path) -> None:
    first, *others = synthetic_swarm(2, 4, 3).records
    assert "- to 20" in page_of(run_dir(tmp_path, [replace(first, time=math.nan), *others]))


def test_a_report_shows_what_the_model_wrote_in_the_first_the_last_and_some_rounds_between(tmp_path: Path) -> None:
    records = [replace(record, continuations=(f" wrote {record.round}.", HARM) if record.round else ())
               for record in synthetic_swarm(2, 4, 60).records]
    evaluation = CONFIG.evaluation.model_copy(update={"prompts": ("The house", HARM)})
    page = Page(page_of(run_dir(tmp_path, records, config=CONFIG.model_copy(update={"evaluation": evaluation}))))
    shown = [number for number in range(61) if f" wrote {number}." in page.text]
    assert (len(shown), shown[0], shown[-1]) == (8, 1, 60)
    assert "The house" in page.text
    assert "script" not in page.tags


def test_a_report_shows_no_command_with_a_damaged_address(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, synthetic_swarm(2, 4, 3).records)
    for address, is_shown in ((EXAMPLE_ADDRESS, True), ("", False), ("damaged", False)):
        (folder / ADDRESS_FILE).write_text(f"{address}\n")
        assert ("export --from" in page_of(folder)) == is_shown


def test_a_run_that_has_lost_its_history_is_not_told_to_wait(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [])
    (folder / LOG).touch()
    for lose in (Path.unlink, Path.touch):
        lose(folder / HISTORY_FILE)
        with pytest.raises(UserError, match=r"history\.jsonl: has no round, and the log of commits has some; while"):
            page_of(folder)


def test_a_run_without_a_round_has_no_report(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, synthetic_swarm(2, 4, 0).records)
    with pytest.raises(UserError, match="no round with training yet"):
        page_of(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", json.dumps(RESULTS | {"tasks": 3}).encode(), None])
def test_a_file_that_evaluate_did_not_write_is_refused(tmp_path: Path, content: bytes | None) -> None:
    folder, file = run_dir(tmp_path / "run", synthetic_swarm(2, 4, 3).records), tmp_path / "results.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"results.json: (not results of|cannot be read)"):
        page_of(folder, [file])


def test_the_command_writes_the_page_into_the_run_dir_or_where_it_is_told(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "run", synthetic_swarm(2, 4, 3).records)
    for options, target in (([], folder / "report.html"), (["--output", str(tmp_path / "a.html")], tmp_path / "a.html")):
        ended = call("report", str(folder), *options)
        assert (ended.code, ended.stdout) == (0, f"{target}\n")
        assert Page(target.read_text()).tags["svg"] == 3


def test_with_json_the_command_prints_the_figures_of_the_page(tmp_path: Path) -> None:
    records = synthetic_swarm(2, 4, 3).records
    folder = run_dir(tmp_path / "run", records)
    ended = call("report", str(folder), "--json")
    found = json.loads(ended.stdout)
    assert (ended.code, found["report"], found["round"], found["tokens"]) == (
        0, str(folder / "report.html"), 3, records[-1].total_tokens,
    )
    assert {each["peer"] for each in found["contributions"]} == {each.peer for each in records[-1].contributions}
    assert Page((folder / "report.html").read_text()).tags["svg"] == 3

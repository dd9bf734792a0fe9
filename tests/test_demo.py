"""The demo's own material: questions that follow from the held-out text, and promises that are really checked."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
QUESTIONS = [json.loads(line) for line in (ROOT / "configs/demo_eval/questions.jsonl").read_text("utf-8").split("\n") if line]


def documents(folder: str) -> list[str]:
    """The texts of one half of the carried text, with white space made single."""
    paths = sorted((ROOT / "configs" / "demo_text" / folder).glob("*.jsonl"))
    lines = [line for path in paths for line in path.read_text("utf-8").split("\n") if line]
    return [" ".join(json.loads(line)["text"].split()) for line in lines]


def test_the_questions_are_current() -> None:
    command = [sys.executable, "tools/demo_questions", "--check"]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


def test_exactly_one_choice_follows_the_passage() -> None:
    held_out = documents("held_out")
    for question in QUESTIONS:
        following = [any(" ".join(f"{question['passage']} {choice}".split()) in text for text in held_out)
                     for choice in question["choices"]]
        assert following == [index == question["answer"] for index in range(4)]


def test_no_question_was_trained_on() -> None:
    trained = "\n".join(documents("train"))
    assert not [question for question in QUESTIONS if " ".join(question["passage"].split()) in trained]


def test_no_position_is_preferred() -> None:
    answers = [question["answer"] for question in QUESTIONS]
    assert all(len(QUESTIONS) / 8 < answers.count(position) < len(QUESTIONS) / 2.5 for position in range(4))


def kept_promises(run_dir: Path) -> dict[str, Any]:
    plot = run_dir / "loss.png"
    plot.touch()
    return {"rounds": 3, "val_loss_first": 8.3, "val_loss_last": 5.2, "digests_equal": True,
            "bytes_sent": 10, "bytes_received": 10, "paragraph": "My fellow Americans, and so on.", "loss_plot": str(plot),
            "evaluation": {"demo_continuation": {"acc,none": 0.5}}}


@pytest.mark.parametrize(("change", "expected"), [
    ({}, []),
    ({"val_loss_last": 8.4}, ["the held-out loss, measured every fourth round, did not fall"]),
    ({"val_loss_last": float("nan")}, ["the held-out loss, measured every fourth round, did not fall"]),
    ({"digests_equal": False}, ["the peers do not hold the same bits"]),
    ({"rounds": 0}, ["no round was committed"]),
    ({"bytes_received": 0}, ["nothing was sent between peers"]),
    ({"evaluation": {}}, ["the evaluation gave no accuracy"]),
    ({"paragraph": ""}, ["the checkpoint wrote no text"]),
    ({"loss_plot": "absent.png"}, ["there is no loss plot"]),
])
def test_the_demo_succeeds_only_if_it_kept_its_promises(tmp_path: Path, change: dict[str, Any], expected: list[str]) -> None:
    summary_tool = runpy.run_path(str(ROOT / "tools" / "demo_summary"))
    assert summary_tool["broken_promises"]({**kept_promises(tmp_path), **change}) == expected

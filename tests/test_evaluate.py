"""lm-eval on a tiny random checkpoint, offline; and every way in which a checkpoint or a task can be wrong."""

import json
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import lm_eval
import pytest
import torch
import yaml
from network_swarm import call
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from spes_p2p.client.evaluate import check_checkpoint, evaluate, find_tasks, render, write_into_card
from spes_p2p.client.loading import load_model, load_tokenizer
from spes_p2p.client.task_names import check_names, definitions, parse_tasks
from spes_p2p.errors import UserError

ARC_EASY = Path(__file__).parents[2] / "shared/data/evals/ARC-Easy.validation.arrow"
WORDS = ["<|endoftext|>", "<unk>", "the", "sky", "is", "grass", "blue", "green", "snow", "white"]
QUESTIONS = [
    {"question": "the sky is", "choices": ["blue", "green"], "answer": 0},
    {"question": "the grass is", "choices": ["blue", "green"], "answer": 1},
    {"question": "the snow is", "choices": ["green", "white"], "answer": 1},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    OlmoeForCausalLM(OlmoeConfig(vocab_size=16, max_position_embeddings=512, **shape, **experts)).save_pretrained(folder)
    raw = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=WORDS[0], pad_token=WORDS[0]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "colours.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = {
        "task": "colours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "colours.jsonl")}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "colours.yaml").write_text(yaml.safe_dump(task))
    lost = {**task, "task": "lost", "dataset_kwargs": {"data_files": {"validation": str(folder / "nowhere.jsonl")}}}
    (folder / "lost.yaml").write_text(yaml.safe_dump(lost))
    (folder / "fixed.yaml").write_text(yaml.safe_dump({**task, "task": "fixed", "num_fewshot": 0}))
    group = {"group": "nature", "task": ["colours"], "aggregate_metric_list": [{"metric": "acc"}], "metadata": {"version": 3}}
    (folder / "nature.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    asked: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        asked.append(arguments)
        raise OSError("a local task asked the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


@pytest.mark.long
def test_local_task_scores_every_example_without_the_network(checkpoint: Path, tasks: Path, no_network: list[object]) -> None:
    result = evaluate(checkpoint, {"colours": None}, include_path=tasks)
    assert result["samples"] == {"colours": 3}
    assert result["tasks"]["colours"]["acc"] * 3 in (0, pytest.approx(1), pytest.approx(2), 3)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert no_network == []


@pytest.mark.long
def test_limit_and_fewshot_reach_the_task(checkpoint: Path, tasks: Path) -> None:
    result = evaluate(checkpoint, {"colours": 1}, include_path=tasks, limit=2)
    assert (result["samples"], result["num_fewshot"]) == ({"colours": 2}, {"colours": 1})


@pytest.mark.long
def test_who_asks_for_more_shots_than_fit_into_the_context_is_told(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(checkpoint, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    shown = [render(evaluate(short, {"colours": shots}, include_path=tasks)).splitlines() for shots in (1, 2)]
    assert len(shown[0]) == 3
    assert shown[1][3:] == ["warning: prompts longer than the model's context of 8 tokens have lost their beginning, shots "
                            "first: 3 of 3 in colours; give fewer shots"]
    found = {**evaluate(short, {"colours": 1}, include_path=tasks), "cut": {"colours": 2}, "num_fewshot": {"colours": 0}}
    assert render(found).endswith("2 of 3 in colours")


def test_evaluation_leaves_the_network_switches_as_they_were(
    checkpoint: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError):
        evaluate(checkpoint, {"lost": None}, include_path=tasks)
    assert (huggingface_hub.constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")) == (False, None)


def test_own_tasks_are_found_without_a_scan_of_all_installed_ones(tasks: Path) -> None:
    assert find_tasks(["colours"], tasks).all_tasks == ["colours", "fixed", "lost", "nature"]


def test_shots_are_read_per_task_and_a_group_has_its_own() -> None:
    assert parse_tasks("piqa,arc_easy:5,piqa:2") == {"piqa": 2, "arc_easy": 5}
    spes = parse_tasks("spes,mmlu:5")
    assert (len(spes), spes["arc_challenge"], spes["hellaswag"], spes["mmlu"], spes["sciq"]) == (12, 25, 10, 5, None)


@pytest.mark.long
def test_names_of_own_tasks_and_of_all_in_spes_are_known(tasks: Path) -> None:
    check_names(["nature", *parse_tasks("spes")], tasks)
    with pytest.raises(UserError, match="unknown task 'natur'; did you mean 'nature'"):
        check_names(["natur"], tasks)


@pytest.mark.long
def test_card_of_an_export_gets_the_groups_results_once_a_command(
    checkpoint: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "README.md").write_text("# a model\n\n## Use\n\ntext\n")
    monkeypatch.chdir(tmp_path)
    results = evaluate(model, {"nature": 1}, include_path=tasks, dtype="bf16")
    assert capfd.readouterr().err == ""  # no terminal: no bars, and nothing of git's
    head, columns, row = render({**results, "round": 7}).splitlines()
    assert head == f"{model}, base of round 7; lm-eval {lm_eval.__version__}, weights in bfloat16, on cpu"
    assert columns.split() == ["task", "version", "shots", "examples", "result", "±", "standard", "error"]
    assert row.startswith("nature  3        1      3         acc ")
    write_into_card(model, results, "nature:1", tasks, None, "8")
    assert (model / "README.md").read_text() == "# a model\n\n## Use\n\ntext\n"
    (model / "spes_p2p.json").write_text("{}")
    for given in ("nature:1", "nature", "nature:1"):
        write_into_card(model, results, given, tasks, None, "8")
    _, use, *sections = (model / "README.md").read_text().split("\n## ")
    accuracy, error = results["tasks"]["nature"]["acc"], results["tasks"]["nature"]["acc_stderr"]
    options = f"--dtype bf16 --device cpu --batch-size 8 --include-path {tasks.name}"
    assert (use, len(sections)) == ("Use\n\ntext\n", 2)
    assert sections[-1] == (
        f"Evaluation\n\n```sh\nspes-p2p evaluate PATH --tasks nature:1 {options}\n```\n\n"
        f"PATH is the folder with this page. lm-eval {lm_eval.__version__}, weights in bfloat16, on cpu.\n\n"
        f"The tasks in `{tasks.name}` are not lm-eval's own: ask whoever evaluated for that folder.\n\n"
        "| task | version | shots | examples | result ± standard error |\n| --- | --- | --- | --- | --- |\n"
        f"| nature | 3 | 1 | 3 | acc {accuracy:.4f} ± {error:.4f} |\n"
    )


@pytest.mark.parametrize(("wrong", "expected"), [
    ({"fixed": 2}, "--tasks fixed:2: the task 'fixed' fixes its shots to 0"),
    ({"nature": None, "colours": None}, "'colours' is in both 'nature' and 'colours'"),
    ({"colours": 3}, "--tasks colours:3: the task 'colours' has 2 examples to show; give at most 2 shots"),
])
def test_shots_or_tasks_that_cannot_be_are_refused(
    checkpoint: Path, tasks: Path, wrong: dict[str, int | None], expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as problem:
        evaluate(checkpoint, wrong, include_path=tasks)
    assert "\n" not in str(problem.value)


def test_task_whose_data_is_missing_is_named(checkpoint: Path, tasks: Path) -> None:
    with pytest.raises(UserError, match=r"task 'lost' cannot be loaded: .*nowhere\.jsonl") as problem:
        evaluate(checkpoint, {"lost": None}, include_path=tasks)
    assert "\n" not in str(problem.value)


def test_missing_include_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--include-path .*absent: no such folder"):
        check_names(["colours"], tmp_path / "absent")


def test_evaluating_no_task_is_refused() -> None:
    with pytest.raises(UserError, match="--tasks is empty"):
        parse_tasks(",")


def test_whole_checkpoint_is_accepted(checkpoint: Path) -> None:
    check_checkpoint(checkpoint)


def test_missing_checkpoint_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent: no such checkpoint folder"):
        check_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: .*missing"):
        check_checkpoint(damaged)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kept", [0, 4, 0.001, 0.5, -1])
def test_file_cut_short_is_named(damaged: Path, name: str, kept: float) -> None:
    content = (damaged / name).read_bytes().rstrip(b"\n")
    (damaged / name).write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(UserError, match=f"{name}: ") as problem:
        check_checkpoint(damaged)
    assert "\n" not in str(problem.value)


def test_absurd_header_length_is_not_read(damaged: Path) -> None:
    (damaged / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match=r"model\.safetensors: missing or damaged \(.*header"):
        check_checkpoint(damaged)


def test_missing_shard_is_named(damaged: Path) -> None:
    shard = "model-00001-of-00002.safetensors"
    (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(UserError, match=f"{shard}: missing or damaged"):
        check_checkpoint(damaged)


def test_shard_without_a_promised_tensor_is_named(damaged: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "no.such.weight": "model.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model\.safetensors: tensor no\.such\.weight is missing"):
        check_checkpoint(damaged)


@pytest.mark.parametrize("index", [
    '{"weight_map": ["lm_head.weight"]}', '{"weight_map": {"a": "model.safetensors", "b": 5}}',
    '{"weight_map": {"a": "\\ud800"}}', '{"weight_map":' * 10**5,
], ids=lambda index: index[:30])
def test_an_index_that_names_no_files_is_damaged(damaged: Path, index: str) -> None:
    (damaged / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: damaged; export the checkpoint again"):
        check_checkpoint(damaged)


def test_weights_of_a_smaller_model_are_refused(damaged: Path, tasks: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"no weights for model\.layers\.2\."):
        evaluate(damaged, {"colours": None}, include_path=tasks)


NORM = "model.norm.weight"
HARMS: dict[str, Callable[[Path], object]] = {
    f": no weights for {NORM}; ": lambda folder: change_norm(folder, lambda norm: norm[:1]),
    f": {NORM} has weights that are not finite; ": lambda folder: change_norm(folder, lambda norm: norm / 0),
    ": transformers cannot load it (ValueError: ": lambda folder: (folder / "config.json").write_text("{}"),
    ": transformers cannot load it (KeyError: ": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "/config.json: damaged; ": lambda folder: (folder / "config.json").write_text("[]"),
}


def change_norm(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, NORM: change(weights[NORM]).clone()}, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> None:
    check_checkpoint(folder)
    load_tokenizer(folder, load_model(folder, "cpu", None))


@pytest.mark.parametrize("said", HARMS)
def test_what_transformers_finds_wrong_is_one_line(damaged: Path, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    HARMS[said](damaged)
    with pytest.raises(UserError) as refused:
        load(damaged)
    assert str(refused.value).startswith(f"{damaged}{said}")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_no_installed_task_is_taken_for_unknown() -> None:
    with pytest.raises(UserError, match="unknown task 'arc_esy'; did you mean 'arc_easy'"):
        find_tasks(["arc_esy"], None)
    text = "\n".join(definitions([Path(lm_eval.__file__).parent / "tasks"]))
    assert set(find_tasks(["arc_easy"], None).all_tasks) <= set(re.findall(r"[\w.()-]+", text))


@pytest.mark.slow
@pytest.mark.skipif(not ARC_EASY.exists(), reason=f"needs the local evaluation data {ARC_EASY.name} beside the repository")
def test_installed_task_runs_on_local_data(checkpoint: Path, tmp_path: Path, no_network: list[object]) -> None:
    import lm_eval.tasks

    task = {
        "include": str(Path(lm_eval.tasks.__file__).parent / "arc/arc_easy.yaml"),
        "task": "arc_easy_local",
        "tag": None,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(ARC_EASY)}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
        "fewshot_split": "validation",
    }
    (tmp_path / "arc.yaml").write_text(yaml.safe_dump(task))
    result = evaluate(checkpoint, {"arc_easy_local": None}, include_path=tmp_path, limit=5)
    assert result["samples"] == {"arc_easy_local": 5}
    assert set(result["tasks"]["arc_easy_local"]) >= {"acc", "acc_norm"}
    assert no_network == []


def test_a_disk_without_room_for_the_results_keeps_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.client.evaluate.evaluate", lambda *given: {"tasks": "x" * 2**16})
    monkeypatch.setattr("spes_p2p.client.evaluate.render", lambda results: "a table")
    monkeypatch.setattr("spes_p2p.client.task_names.check_names", lambda *given: None)
    output = tmp_path / "results.json"
    output.write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, hard))
    try:
        ended = call("evaluate", str(tmp_path), "--tasks", "piqa", "--output", str(output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (ended.code, ended.stdout) == (2, "a table\n")
    assert ended.stderr.startswith(f"error: {output}: ")
    assert output.read_text() == "earlier"

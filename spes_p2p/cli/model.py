"""Commands that take a model out of a campaign: export, evaluate, generate."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.cli import options
from spes_p2p.cli.terminal import ProgressBar, ended_by_signals, run, waiting
from spes_p2p.errors import UserError
from spes_p2p.observe.log import setup_logging
from spes_p2p.storage.files import require_place, require_writable, write_whole

if TYPE_CHECKING:
    from spes_p2p.client.export import Exportable
    from spes_p2p.model.export import ExportDtype


@ended_by_signals()
def export(
    output: Annotated[Path, typer.Option(help="Folder for the checkpoint; must not exist.")],
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer.")] = None,
    round_number: Annotated[int | None, typer.Option("--round", help="Archived round. Default: the last round.")] = None,
    addresses: options.FromAddresses = None,
    push_to: Annotated[str | None, typer.Option(help="Upload the checkpoint to this Hub repository: OWNER/NAME.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the Hub repository as private.")] = False,
    dtype: Annotated[str, typer.Option(help="fp32: the base's exact values; bf16: rounded, half the size.")] = "fp32",
) -> None:
    """Export a committed base, from a run-dir or a running swarm, as a Hugging Face checkpoint with a model card."""
    if (run_dir is None) == (not addresses):
        raise UserError("export: give either --run-dir of a peer or --from with an address of the swarm")
    if output.exists():
        raise UserError(f"{output}: already exists; name another output directory or remove it")
    require_writable(output.parent)
    if round_number is not None and run_dir is None:
        raise UserError("export: --round needs an archive; give the --run-dir of a bootstrap peer")
    if dtype not in ("fp32", "bf16"):
        raise UserError(f"--dtype {dtype}: must be fp32 or bf16")
    with waiting("starting"):
        from spes_p2p.client.export import check_repository, from_run_dir, push_to_hub

    if push_to is not None:
        check_repository(push_to)
    if run_dir is not None:
        made = from_run_dir(run_dir, round_number)
    else:
        made = _download_base(addresses or [], output.parent)
    made.write(output, dtype, start_files=True)  # type: ignore[arg-type]
    print(f"base of round {made.origin.round} (digest {made.origin.digest[:12]}): {output}")
    if push_to is not None:
        print(push_to_hub(output, push_to, private))


@ended_by_signals()
def evaluate(
    tasks: Annotated[str, typer.Option(
        help="Comma-separated lm-eval tasks, each with its few-shot examples or its own number: piqa,arc_challenge:25; "
             "spes: the twelve of SPES.")],
    model_dir: Annotated[Path | None, typer.Argument(help="Folder of a Hugging Face checkpoint.")] = None,
    addresses: options.FromAddresses = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer, whose last base to evaluate.")] = None,
    include_path: options.IncludePath = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of examples per task.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32. Default: as in the checkpoint.")] = None,
    batch_size: Annotated[str, typer.Option(help="Examples per pass; auto: as many as fit the GPU.")] = "8",
    output: Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Evaluate a checkpoint, or the newest base of a running swarm, with lm-eval; an export's model card gets the results."""
    from spes_p2p.client import evaluate as evaluation
    from spes_p2p.client.task_names import check_names, parse_tasks

    _require_one_source("evaluate", model_dir, addresses, run_dir)
    if output is not None:
        require_place(output, "--output")
    evaluation.check_options(limit, device, batch_size, dtype)
    shots = parse_tasks(tasks)
    check_names(shots, include_path)
    batch = int(batch_size) if batch_size.isdecimal() else batch_size
    with tempfile.TemporaryDirectory(prefix="spes-evaluate-") as folder:
        origin = {}
        downloaded = Path(folder) / "checkpoint"
        if model_dir is None:
            made = _base_of(addresses, run_dir, Path(folder))
            made.write(downloaded, dtype or "fp32")  # type: ignore[arg-type]
            origin = {"model": made.files.campaign.config.name, "round": made.origin.round, "digest": made.origin.digest}
        results = {**evaluation.evaluate(model_dir or downloaded, shots, include_path, limit, device, batch, dtype), **origin}
    text = json.dumps(results, indent=2)
    # First, so that a disk that is full by now does not cost the results.
    print(text if as_json else evaluation.render(results))
    if output is not None:
        write_whole(output, f"{text}\n".encode())
    if model_dir is not None:
        evaluation.write_into_card(model_dir, results, tasks, include_path, limit, batch_size)


@ended_by_signals()
def generate(
    model_dir: Annotated[Path | None, typer.Argument(help="Folder of a Hugging Face checkpoint.")] = None,
    addresses: options.FromAddresses = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer, whose last base to continue with.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(
        "--prompt", help="Text to continue; repeatable. Default: each line that you type, or that is piped in.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per continuation.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as the model says.")] = 0.8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32. Default: as in the checkpoint.")] = None,
    follow: Annotated[bool, typer.Option(
        "--follow", help="With --from: change to each newer base as it comes, between two prompts.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write prompts and continuations to this JSON file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Continue text with a checkpoint, the base of a run-dir, or the newest base of a running swarm."""
    from spes_p2p.client.evaluate import check_checkpoint, check_device, check_dtype
    from spes_p2p.client.model_card import exported_round

    _require_one_source("generate", model_dir, addresses, run_dir)
    if follow and not addresses:
        raise UserError("generate: --follow needs --from with an address of the swarm")
    if prompts and "" in prompts:  # before a base is downloaded
        raise UserError("--prompt '': is empty; give text to continue")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be at least 1")
    if not 0 <= temperature <= 10:
        raise UserError(f"--temperature {temperature}: must be from 0 to 10")
    check_device(device)
    check_dtype(dtype)
    written: ExportDtype = "bf16" if dtype == "bf16" else "fp32"
    if output is not None:
        require_place(output, "--output")
    if model_dir is not None:
        check_checkpoint(model_dir)
    with tempfile.TemporaryDirectory(prefix="spes-generate-") as folder:
        name, base_round = str(model_dir), exported_round(model_dir) if model_dir is not None else None
        if model_dir is None:
            made = _base_of(addresses, run_dir, Path(folder))
            name, base_round, model_dir = made.files.campaign.config.name, made.origin.round, Path(folder) / "checkpoint"
            made.write(model_dir, written)
            del made  # the base, which is as large as the model
            print(f"{name}, base of round {base_round}", file=sys.stderr)
        with waiting("loading the model"):
            from spes_p2p.client.export import from_swarm
            from spes_p2p.client.generate import Continuation, following, unchanging

            model = Continuation(model_dir, device, dtype)

        def fetch(after: int) -> Coroutine[Any, Any, Exportable]:
            return from_swarm(addresses or [], Path(folder), lambda done, size: None, after)

        def show(text: str) -> None:
            if not as_json:
                print(text, end="", flush=True)

        kept = following(fetch, Path(folder), device, base_round or 0, written) if follow else unchanging()
        told = []
        with kept as newer:
            for number, prompt in enumerate(prompts or _typed_lines(), 1):
                if (found := newer()) is not None:
                    base_round, model = found
                    print(f"{name}, base of round {base_round}", file=sys.stderr)
                if prompts:
                    show(prompt)
                try:
                    text = model.write(prompt, max_new_tokens, temperature, show)
                except UserError as error:
                    if prompts or not sys.stdin.isatty():
                        raise UserError(f"prompt {number}: {error}") from None
                    print(f"error: {error}", file=sys.stderr)  # a person types another line
                    continue
                show("\n")
                told.append({"round": base_round, "prompt": prompt, "text": text})
    document = json.dumps({"model": name, "round": base_round, "continuations": told}, indent=2)
    if output is not None:
        write_whole(output, document.encode())
    if as_json:
        print(document)


def _require_one_source(command: str, model_dir: Path | None, addresses: list[str] | None, run_dir: Path | None) -> None:
    """Raise UserError unless exactly one of the places of a model is given."""
    if [model_dir is None, not addresses, run_dir is None].count(False) != 1:
        raise UserError(f"{command}: give a checkpoint folder, --from with an address of the swarm, or --run-dir of a peer")


def _typed_lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not empty; show a prompt on a terminal."""
    sign = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(sign).rstrip("\n"):
                yield line


def _download_base(addresses: list[str], folder: Path) -> Exportable:
    setup_logging("warning", False)
    with waiting("starting"):
        from spes_p2p.client.export import from_swarm

    with ProgressBar("downloading the base") as update:
        made: Exportable = run(from_swarm(addresses, folder, update))
    return made


def _base_of(addresses: list[str] | None, run_dir: Path | None, folder: Path) -> Exportable:
    """Return the last base of a run-dir or, without one, the newest of the swarm, in a temporary file of `folder`."""
    if run_dir is None:
        return _download_base(addresses or [], folder)
    with waiting("starting"):
        from spes_p2p.client.export import from_run_dir

    return from_run_dir(run_dir)

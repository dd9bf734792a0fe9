"""What a peer's experts are worth: the held-out loss of its base without them, above that with them.

Measured by a process of its own at the lowest priority, on the CPU, since it imports torch and holds the model in float32.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spes_p2p.campaign.files import CampaignFiles, read_run_dir
from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.observe.worth import WORTH_FILE, Worth, kept_worth
from spes_p2p.rounds.gate import effect_of
from spes_p2p.session.apart import Progress, run_apart_telling
from spes_p2p.session.run_dir import load_run_dir_base
from spes_p2p.session.text import held_out_samples, missing_held_out, open_text
from spes_p2p.storage.files import write_whole

LOWEST_PRIORITY = 19


class HeldOutMissing(UserError):
    """The run-dir lacks pieces of the held-out text. Trainers evaluate in turns, so it may not have needed them yet."""


def worth_of(
    run_dir: Path, experts: Sequence[int], addresses: Sequence[str] = (), data_dirs: Sequence[Path] = (),
    on_progress: Progress = lambda done, total: None,
) -> Worth:
    """Return what these experts are worth in the run-dir's base, from an earlier call if it has not changed since.

    `addresses`: of the swarm, to fetch held-out text that is neither in the run-dir nor in `data_dirs`. `on_progress` gets the
    passes of held-out samples through the model, two for each. Raises UserError.
    """
    if not experts:
        raise UserError(f"{run_dir}: this trainer owns no experts yet; wait for its first round")
    arguments = run_dir, tuple(experts), tuple(data_dirs)
    try:
        found: Worth = run_apart_telling(on_progress, _measured_or_kept, *arguments)
    except HeldOutMissing:
        if not addresses:
            raise
        asyncio.run(_fetch_held_out(_files(run_dir, data_dirs), run_dir, addresses))
        found = run_apart_telling(on_progress, _measured_or_kept, *arguments)
    return found


async def _fetch_held_out(files: CampaignFiles, run_dir: Path, addresses: Sequence[str]) -> None:
    """Fetch the held-out text into the run-dir's cache, where a trainer that runs finds it too."""
    from spes_p2p.client.connection import connect
    from spes_p2p.content.fetcher import Fetcher
    from spes_p2p.content.tokens import TokenLibrary

    shelf = open_text(files, run_dir, None)
    async with connect(addresses) as swarm:
        contacts = await swarm.contacts()
        trainers, helpers = ([peer for peer in contacts if contacts[peer].role == role] for role in ("trainer", "helper"))
        fetcher = Fetcher(swarm.endpoint)
        library = TokenLibrary(shelf, fetcher, lambda: (trainers, helpers), asyncio.to_thread, random.Random())
        for file, pieces in missing_held_out(files, shelf):
            await library.ensure(file, pieces)


def _files(run_dir: Path, data_dirs: Sequence[Path]) -> CampaignFiles:
    known = read_run_dir(run_dir)
    if known is None:
        raise UserError(f"{run_dir}: not a peer's run-dir (it contains no campaign); give the run-dir of your trainer")
    return replace(known[0], folders=tuple(data_dirs))


def _measured_or_kept(
    on_progress: Progress, run_dir: Path, experts: tuple[int, ...], data_dirs: tuple[Path, ...]
) -> Worth:
    files = _files(run_dir, data_dirs)
    _check_that_others_suffice(files.campaign.config.model, experts)
    _, base = load_run_dir_base(run_dir)
    kept = kept_worth(run_dir)
    if kept is not None and (kept.digest, kept.experts) == (base.digest, experts):
        return kept
    # Only now: beside a trainer, this process may wait for minutes.
    os.nice(LOWEST_PRIORITY - os.nice(0))
    losses, without = masked_losses(files, run_dir, base.values, experts, on_progress)
    loss, effect = float(losses.mean()), effect_of(losses, without)
    found = Worth(max(0, base.round), base.digest, experts, len(losses), loss, loss + effect.nats, effect.error)
    write_whole(run_dir / WORTH_FILE, json.dumps(asdict(found)).encode())
    return found


def _check_that_others_suffice(model: ModelSection, experts: Sequence[int]) -> None:
    from spes_p2p.model.shape import shape_of

    top_k = shape_of(model).top_k
    most = model.moe_num_experts - top_k
    if len(experts) > most:
        raise UserError(f"the worth of {len(experts)} of {model.moe_num_experts} experts cannot be measured: too few would "
                        f"remain, since each token needs {top_k}; wait for more trainers, which take some over, or join with "
                        f"--experts {most}")


def masked_losses(
    files: CampaignFiles, run_dir: Path, base: np.ndarray, experts: Sequence[int],
    on_progress: Progress = lambda done, total: None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each held-out sample's loss with and without these experts, `[samples]` each. Raises UserError."""
    from spes_p2p.model.build import layout_of
    from spes_p2p.model.masking import without_experts
    from spes_p2p.model.partitioned import PartitionedExperts
    from spes_p2p.training.options import TrainingOptions
    from spes_p2p.training.trainer import TorchTrainer

    config = files.campaign.config
    layout = layout_of(config.model)
    shelf = open_text(files, run_dir, None)
    if missing_held_out(files, shelf):
        raise HeldOutMissing(f"{run_dir}: the held-out text is not all here; start the trainer, or give its --data-dir")
    samples = held_out_samples(files, shelf, lambda file, pieces: None)
    options, eos = TrainingOptions(stored="fp32", micro_batch_size=1), files.training_manifest.eos_token_id
    trainer = TorchTrainer(config, base[: layout.size], (), None, options=options, eos_token_id=eos)
    specs = [placed.spec for placed in layout.tensors]
    routers = [spec.name for spec in specs if spec.kind == "router" and len(spec.shape) == 2]

    def losses_of(done: int) -> npt.NDArray[np.float64]:
        found = np.empty(len(samples))
        for i in range(len(samples)):
            on_progress(done + i, 2 * len(samples))
            found[i : i + 1] = trainer.losses_of(samples[i : i + 1])
        return found

    losses = losses_of(0)
    with without_experts(trainer.model, routers, experts):
        without = losses_of(len(samples))
    blocks = [block for block in trainer.model.modules() if isinstance(block, PartitionedExperts)]
    if any(block.routed is not None and int(block.routed[list(experts)].sum()) for block in blocks):
        raise UserError(f"model_type = {config.model.architecture!r}: its routers cannot be kept from single experts, so "
                        "their worth cannot be measured")
    return losses, without

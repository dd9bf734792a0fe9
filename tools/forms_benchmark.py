"""Forms of a step that differ by rounding only, on one device: first whether they agree, then how fast they are.

./tools/bench forms                                     on a CPU with a small model
./tools/bench forms --config configs/1b.yaml --cap 24GiB --device cuda

Parity: the gradients of experts without tokens in torch's grouped product and in ours, and how much of one document reaches the
next in a sample. Speed: a step of the setup that the planner chooses for the cap, with each form of what is outside the experts
(`spes_p2p/training/compiled.py`), and the difference of a trial from the plain form. What fails is reported as such.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks
import torch
from bench_json import parser_of, tell
from torch import nn

from spes_p2p.campaign.room import Device, find_room
from spes_p2p.config.campaign import CampaignConfig, load_campaign_config
from spes_p2p.config.quantities import parse_bytes
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.backends import GroupedMM
from spes_p2p.model.build import State, build_model, initial_state
from spes_p2p.model.flops import peak_flops, training_flops_per_token
from spes_p2p.model.memory import Setup
from spes_p2p.training.compiled import Trial, forms_of, trial_of
from spes_p2p.training.device import autocast, device_name
from spes_p2p.training.documents import Documents
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer

EOS = 0
DOCUMENT_TOKENS = 300
FLASH = "FlashAttention"
FORMS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "plain": (False, ()),
    "compiled": (False, ("compiled layers",)),
    "eager_attention": (False, ("eager",)),
    "flash": (False, (FLASH,)),
    "flash_compiled": (False, (FLASH, "compiled layers")),
    "masked": (True, ()),
    "masked_compiled": (True, ("compiled layers",)),
    "masked_flash": (True, (FLASH,)),
    "masked_flex": (True, ("FlexAttention",)),
    "masked_flex_compiled": (True, ("FlexAttention", "compiled layers")),
}
"""Whether documents are kept apart, and the forms or attention implementations of transformers that are used."""
USUAL = ("plain", "compiled", "masked", "masked_compiled")
"""Forms that need neither another package nor much memory nor a certain family."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each form, at least 5 (default 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a campaign's model instead of the built-in one")
    parser.add_argument("--cap", default="4GiB", metavar="SIZE", help="memory to plan with (default 4GiB)")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM", help=", ".join(FORMS))
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error(f"--rounds {arguments.rounds}: a median of fewer than 5 says little")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    device = torch.device(arguments.device)
    small = benchmarks.campaign(hidden_size=64, intermediate_size=64, moe_num_experts=4, num_hidden_layers=2, vocab_size=256)
    try:
        config = small if arguments.config is None else load_campaign_config(arguments.config)
        forms = speeds(config, parse_bytes(arguments.cap, "--cap"), arguments.only, arguments.rounds, device)
        report = {
            **empty_groups(device), **leak(small, device), "campaign": config.name,
            "forms_failed": sum("failed" in form for form in forms.values()),
            "usual_forms_failed": sum("failed" in form for name, form in forms.items() if name in USUAL),
            "worst_difference": max((form["difference"] for form in forms.values() if "difference" in form), default=None),
            **forms,
        }
    except UserError as error:
        parser.error(str(error))
    tell({**report, "environment": benchmarks.environment(arguments.device)}, arguments.json)
    return 0


def empty_groups(device: torch.device) -> benchmarks.Report:
    """Return the largest gradient of groups without rows, where freed memory holds NaN: torch's own, and ours.

    Some GPUs leave these gradients undefined (pytorch issue 172439).
    """
    ends = torch.tensor([162, 162, 2739, 3185, 3185, 3268], dtype=torch.int32, device=device)
    is_empty = torch.tensor([False, True, False, False, True, False], device=device)
    x = torch.randn(3268, 2048, device=device, dtype=torch.bfloat16)
    grad = torch.randn(3268, 768, device=device, dtype=torch.bfloat16)
    found = {}
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: nn.functional.grouped_mm(grad.t(), x, offs=ends),
        "ours": lambda: GroupedMM().weight_gradients(grad, x, ends),
    }
    for name, gradients in ways.items():
        garbage = torch.full((6, 768, 2048), float("nan"), device=device, dtype=torch.bfloat16)
        del garbage
        found[f"empty_group_gradient_{name}"] = float(gradients()[is_empty].abs().max())
    return found


def leak(config: CampaignConfig, device: torch.device) -> benchmarks.Report:
    """Return how much a document's hidden states change with the one before it, relative, with and without the option."""
    model = build_model(config.model, initial_state(config.model), (0, 1), device=device).eval()
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(1, config.model.vocab_size, (2, 1, 64), generator=generator)
    samples[1, :, 30:] = samples[0, :, 30:]
    samples[:, :, 29] = EOS
    found = {}
    for name, documents in (("masked", Documents(EOS, 0)), ("unmasked", None)):
        after = []
        for ids in samples.to(device):
            positions = documents.positions(ids) if documents else None
            with torch.no_grad(), autocast(device):
                hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            after.append(hidden[0, 30:].float())
        found[f"documents_{name}_leak"] = float((after[0] - after[1]).norm() / after[0].norm())
    return found


class Packed(benchmarks.RandomText):
    """Random text of short documents."""

    def __init__(self, config: CampaignConfig):
        super().__init__(config)
        self._samples[:, DOCUMENT_TOKENS::DOCUMENT_TOKENS] = EOS
        self._samples[:, config.training.sequence_length // 2] = EOS


def speeds(
    config: CampaignConfig, cap: int, forms: list[str], rounds: int, device: torch.device
) -> dict[str, benchmarks.Report]:
    """Return tokens/s, MFU, the allocator's peak over the prediction, and the difference to the plain form, for each form."""
    found: dict[str, Any] = {}
    base: State | None = None
    plain: dict[bool, Trial] = {}
    for name in forms:
        is_masked, used = FORMS[name]
        training = config.training.model_copy(update={"intra_document_masking": is_masked, "instance_filter": False})
        changed = config.model_copy(update={"training": training})
        has_8bit = importlib.util.find_spec("torchao") is not None
        room = Device("cuda" if device.type == "cuda" else "cpu", cap, has_adamw8bit=has_8bit)
        choice = find_room(changed, room, "--cap")
        step = training.model_copy(update={"batch_size": 2 * choice.setup.micro_batch})
        changed = changed.model_copy(update={"training": step})
        base = benchmarks.random_base(config, device) if base is None else base
        try:
            with benchmarks.capped(device, cap):
                found[name] = measured(changed, base, choice.setup, used, plain, rounds, device)
                if device.type == "cuda":
                    peak = torch.cuda.max_memory_allocated(device)
                    found[name] |= {"peak_allocated_bytes": peak, "peak_vs_predicted": peak / choice.device.total}
        except Exception as error:  # compilers and kernels raise their own types
            found[name] = {"failed": (str(error).strip().splitlines() or [type(error).__name__])[0]}
        torch._dynamo.reset()
        benchmarks.release(device)
    return found


def measured(
    config: CampaignConfig, base: State, setup: Setup, used: tuple[str, ...], plain: dict[bool, Trial], rounds: int,
    device: torch.device,
) -> benchmarks.Report:
    """Return the numbers of one form. `plain`: trials of the plain form, with and without masks; filled here."""
    training = config.training
    options = TrainingOptions(
        stored=setup.stored, stored_on=setup.stored_on, optimizer=setup.optimizer, micro_batch_size=setup.micro_batch,
        activation_checkpointing=setup.checkpointing, compiles=False,
    )
    text = Packed(config)
    trainer = TorchTrainer(config, base, tuple(range(setup.owned)), text, None, device, options, eos_token_id=EOS)
    ids = torch.from_numpy(text.read(Interval(0, 0, setup.micro_batch))).to(device)
    documents = Documents(EOS, 0) if training.intra_document_masking else None
    trainer.model.train()
    is_masked = documents is not None
    if is_masked not in plain:
        plain[is_masked] = trial_of(trainer.model, ids, documents, lambda: autocast(device))
    if FLASH in used and is_masked and setup.micro_batch > 1:
        raise UserError(f"{FLASH} keeps documents apart in passes of one sample, this setup has {setup.micro_batch}")
    forms = {form.name: form for form in forms_of(trainer.model, is_masked=True)}
    for name in used:
        if name in forms:
            forms[name].use()
        elif name == FLASH:
            raise UserError("flash-attn is not installed")
        else:
            trainer.model.set_attn_implementation(name)
    difference = trial_of(trainer.model, ids, documents, lambda: autocast(device)).difference(plain[is_masked])
    work = benchmarks.one_step(trainer)
    work()
    seconds = statistics.median(benchmarks.interleaved({"step": work}, rounds, device)["step"])
    tokens = training.batch_size * training.sequence_length
    flops = tokens / seconds * training_flops_per_token(config.model, training.sequence_length, trainer.owned)
    card = peak_flops(device_name(device))
    return {"tokens_per_second": tokens / seconds, "mfu": flops / card if card else None, "difference": difference}


if __name__ == "__main__":
    sys.exit(main())

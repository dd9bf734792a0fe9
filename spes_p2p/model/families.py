"""Whether this program trains a model family right. What it cannot compute is refused by name before anything is written."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import PreTrainedModel

from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.build import empty_model, layout_of
from spes_p2p.model.file_format import file_tensors
from spes_p2p.model.partitioned import expert_blocks

SCALED_LOGITS = (
    "logits_scaling", "logit_scale", "final_logit_softcapping", "logits_mup_width_multiplier", "unpadded_vocab_size",
)
"""Settings by which a family changes its logits after the output head."""
RANDOM = ("dropout", "jitter")
"""What the names of settings contain by which a family draws random numbers in training."""
BOUNDS = {
    "eps": (0.0, math.inf), "epsilon": (0.0, math.inf), "theta": (sys.float_info.min, math.inf), "dropout": (0.0, 1.0)
}
"""Least and greatest values of settings whose names contain such a word."""

NO_VERDICT = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException, UnsupportedOperatorException
)
"""What torch raises where a forward pass without values cannot go on, as where shapes depend on them."""


def check_family(model: ModelSection) -> None:
    """Raise UserError unless training supports the family's experts, routers, output head and file format, and sizes fit."""
    empty, layout = empty_model(model), layout_of(model)
    family = f"model_type = {model.architecture!r}"
    if layout.num_experts != model.moe_num_experts:
        raise UserError(f"{family}: its layers have {layout.num_experts} experts, its config.json says {model.moe_num_experts}")
    without = next((name for name, parameter in empty.named_parameters() if not parameter.numel()), None)
    if without is not None:
        raise UserError(f"{family}: {without} has no elements; correct the sizes in its config.json")
    whole_numbers = set(empty.state_dict()) - {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    if whole_numbers:
        raise UserError(f"{family}: has {min(whole_numbers)}, which is not of floating-point numbers; use another family")
    if not hasattr(empty.config, "num_experts_per_tok"):
        raise UserError(f"{family}: its configuration has no num_experts_per_tok; use another family")
    choices = {getattr(module, "num_router_classes", layout.num_experts) for module in empty.modules()}
    if choices != {layout.num_experts}:
        raise UserError(f"{family}: its routers also choose to skip all experts, which training does not support; "
                        "use another family")
    if "router_logits" not in (getattr(empty.base_model, "_can_record_outputs", None) or {}):
        raise UserError(f"{family}: does not report its routers' scores, which load balancing needs; use another family")
    head = empty.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(f"{family}: its output head has a bias, which training does not support; use another family")
    changed = [name for name in SCALED_LOGITS if getattr(empty.config, name, None) not in (None, 1, 1.0)]
    if changed:
        raise UserError(f"{family} with {changed[0]}: its logits are changed after the output head, which training does not "
                        "support; use another family")
    unsound = next(_unsound(empty.config.to_dict()), None)
    if unsound is not None:
        raise UserError(f"{family} with {unsound}: no loss can be computed; correct it in config.json")
    file_tensors(model)
    _check_forward(empty, family)


def _unsound(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings in a config.json, or in its sections, that are outside BOUNDS, as `name = value`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _unsound(value)
        elif isinstance(value, int | float):
            bounds = [BOUNDS[word] for word in str(name).split("_") if word in BOUNDS]
            if not all(least <= value <= most for least, most in bounds):
                yield f"{name} = {value}"


def _check_forward(model: PreTrainedModel, family: str) -> None:
    """Raise UserError unless this model on the meta device makes a forward pass. Computes nothing; replaces its experts."""
    for name, _ in list(expert_blocks(model)):
        model.set_submodule(name, _Experts())
    torchs, verbosity = logging.getLogger("torch._subclasses.fake_tensor"), transformers.logging.get_verbosity()
    was_disabled, torchs.disabled = torchs.disabled, True  # it logs a traceback of what is refused here in one line
    transformers.logging.set_verbosity_error()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.zeros((1, 2), dtype=torch.int64)
            model.train().base_model(input_ids=ids, use_cache=False, output_router_logits=True)
    except NO_VERDICT:
        pass
    except Exception as error:  # torch and families raise their own types
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{family}: its config.json makes no forward pass; check its sizes and heads: "
                        f"{reason}") from None
    finally:
        torchs.disabled = was_disabled
        transformers.logging.set_verbosity(verbosity)


class _Experts(nn.Module):
    """Stands for experts, whose number of rows depends on values: the output is as wide as the input."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


def check_repeatable(model: ModelSection) -> None:
    """Raise UserError if the family draws random numbers in training: audits compare an update with that of training again."""
    settings = [(name, value) for module in empty_model(model).modules() for name, value in vars(module).items()]
    for name, value in settings:
        if any(part in name for part in RANDOM) and isinstance(value, float) and value > 0:
            raise UserError(f"model_type = {model.architecture!r} with {name} = {value}: training draws random numbers, so "
                            "audits of honest peers would fail; set it to 0 in config.json, or sync.audited_share to 0")

"""Turning a dense checkpoint into a mixture of experts: each expert begins as the dense model's MLP (arXiv 2212.05055).

Router weights of the chosen experts sum to 1 in the families made here, so that identical experts compute what the MLP did, for
any router. The rules differ in how experts are told apart:

- `copy`: not at all. The router is drawn with the model's own initialisation.
- `drop`: in each expert, half of the intermediate neurons are drawn anew: their rows of gate and up projection and columns of
  the down projection, from a normal distribution with the mean and deviation of the weights they replace (Drop-Upcycling,
  arXiv 2502.19261, ratio 0.5).
- `spes`: noise of deviation 0.02 on half of each expert's weights; the router is drawn with the deviation of the layer's down
  projection. So does the conversion script that SPES released for its 9B model, with the options of its example.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.build import State, layout_of, refused, transformers_config
from spes_p2p.model.checkpoint import Checkpoint
from spes_p2p.model.file_format import FileTensor, Piece
from spes_p2p.model.layout import Layout, Placed
from spes_p2p.model.partitioned import MATRICES

UpcycleRule = Literal["copy", "drop", "spes"]

FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense families, and those that have the same layers with experts."""
NOT_CARRIED_OVER = ("attention_bias", "mlp_bias", "use_sliding_window")
"""Settings that change what a layer computes and that the other family may lack."""
NOT_WRITTEN = (
    "architectures", "transformers_version", "dtype", "id2label", "label2id", "problem_type", "output_hidden_states",
    "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
)
"""What transformers' configurations hold beside the model's shape."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Names in the dense families' files."""
DROPPED_SHARE = 0.5
NOISY_SHARE, NOISE = 0.5, 0.02


def upcycled_config(dense: dict[str, Any], num_experts: int, top_k: int) -> dict[str, Any]:
    """Return the `config.json` of a dense model's mixture of experts. Raises UserError for a family without one."""
    family = str(dense.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"model_type = {family!r}: cannot be upcycled; use a dense checkpoint of {', '.join(FAMILIES)}")
    try:
        known = CONFIG_MAPPING[family].from_dict(dense).to_dict()
    except Exception as error:  # families and the validation library raise their own types
        raise refused(family, error) from None
    target = FAMILIES[family]
    fields = {*CONFIG_MAPPING[target]().to_dict(), "head_dim"}
    for name in NOT_CARRIED_OVER:
        if known.get(name) and (name not in fields or name == "use_sliding_window"):
            raise UserError(f"model_type = {family!r} with {name} = {known[name]}: {target} has no such layers; "
                            "use a checkpoint without it")
    config = {name: value for name, value in known.items() if name in fields and not name.startswith("_")}
    config |= {"model_type": target, "num_experts_per_tok": top_k}
    if target == "mixtral":
        config |= {"num_local_experts": num_experts}
    else:
        config |= {"num_experts": num_experts, "moe_intermediate_size": known["intermediate_size"], "norm_topk_prob": True}
    for name in NOT_WRITTEN:
        config.pop(name, None)
    return config


def check_dense(model: ModelSection, dense: Checkpoint) -> None:
    """Raise UserError unless the checkpoint has all dense weights of this model. Reads no weights."""
    for tensor in _dense_tensors(layout_of(model), dense):
        dense.check(tensor)


def upcycled_state(model: ModelSection, dense: Checkpoint, rule: UpcycleRule, out: State) -> None:
    """Write base 0 to `out`, flat float32 `[layout.size]`. Random values follow from the model's seed. Raises UserError."""
    check_dense(model, dense)
    layout = layout_of(model)
    for placed in layout.tensors:
        if placed.spec.is_low_rank:
            out[placed.start : placed.stop] = 0
    for tensor in _dense_tensors(layout, dense):
        dense.copy(tensor, out)
    first = layout.expert(0)
    for group in (layout.group("shared"), first):
        if not np.isfinite(out[group.start : group.stop].sum(dtype=np.float64)):
            raise UserError(f"{dense.folder}: has weights that are not finite; download it again")
    _draw_routers(layout, out, rule, model.seed, transformers_config(model).initializer_range)
    for expert in range(1, layout.num_experts):
        group = layout.expert(expert)
        out[group.start : group.stop] = out[first.start : first.stop]
    if rule == "copy":
        return
    for placed in layout.tensors:
        if placed.spec.name.endswith(f".{MATRICES[0]}") and placed.spec.expert is not None:
            rng = _generator(model.seed, placed)
            name = placed.spec.name.removesuffix(MATRICES[0]) + MATRICES[1]
            _tell_apart(out, placed, layout.by_name[name], rule, rng)


def _dense_tensors(layout: Layout, dense: Checkpoint) -> Iterator[FileTensor]:
    """Yield the dense model's tensors with their places: its MLP is the first expert.

    A model with an output head of its own takes a tied dense model's embedding for it, as SPES's script does.
    """
    is_tied = bool(dense.config.get("tie_word_embeddings")) and HEAD not in dense
    for placed in layout.tensors:
        spec = placed.spec
        if spec.kind == "shared" and not spec.is_low_rank:
            name = EMBEDDING if spec.name == HEAD and is_tied else spec.name
            yield FileTensor(name, spec.shape, (Piece(spec.name, placed.start, placed.stop),))
        elif spec.expert == 0:
            mlp, _, matrix = spec.name.partition(".experts.0.")
            names = ("gate_proj", "up_proj") if matrix == MATRICES[0] else (matrix,)
            shape, size = (spec.shape[0] // len(names), *spec.shape[1:]), spec.size // len(names)
            for number, name in enumerate(names):
                start = placed.start + number * size
                yield FileTensor(f"{mlp}.{name}.weight", shape, (Piece(spec.name, start, start + size),))


def _draw_routers(layout: Layout, out: State, rule: UpcycleRule, seed: int, deviation: float) -> None:
    for placed in layout.tensors:
        if placed.spec.kind == "router":
            mlp = placed.spec.name.rpartition(".gate.")[0]
            down = layout.by_name[f"{mlp}.experts.0.{MATRICES[1]}"]
            scale = float(out[down.start : down.stop].std(dtype=np.float64)) if rule == "spes" else deviation
            values = _generator(seed, placed).standard_normal(placed.spec.size, np.float32)
            out[placed.start : placed.stop] = np.float32(scale) * values


def _tell_apart(out: State, gate_up: Placed, down: Placed, rule: UpcycleRule, rng: np.random.Generator) -> None:
    """Change one expert's copy of one layer's MLP."""
    hidden_size, width = down.spec.shape
    gate, up = out[gate_up.start : gate_up.stop].reshape(2, width, hidden_size)
    columns = out[down.start : down.stop].reshape(hidden_size, width)
    if rule == "spes":
        for matrix in (gate, up, columns):
            noise = np.float32(NOISE) * rng.standard_normal(matrix.shape, np.float32)
            matrix += noise * (rng.random(matrix.shape, np.float32) < NOISY_SHARE)
        return
    dropped = np.sort(rng.choice(width, round(DROPPED_SHARE * width), replace=False))
    for matrix in (gate, up, columns.T):
        old = matrix[dropped]
        matrix[dropped] = old.mean() + old.std() * rng.standard_normal(old.shape, np.float32)


def _generator(seed: int, placed: Placed) -> np.random.Generator:
    """Return a generator of this tensor's own, so that no order of computation matters."""
    return np.random.default_rng((abs(seed), int(seed < 0), placed.start))

"""Model FLOPs of training by formula, without recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.config.model import ModelSection
from spes_p2p.model.shape import shape_of
from spes_p2p.model.sizes import sizes_of

PEAK_BF16_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A6000": 155e12,
    "A10G": 70e12, "A10": 125e12, "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}
"""Dense bf16 FLOP/s of well-known GPUs (data sheets; float32 accumulation), by part of their name."""


def training_flops_per_token(model: ModelSection, sequence_length: int, owned: Sequence[int]) -> float:
    """Return 4 N + 2 N_trained + 6 L S q, for N active weights in matrix products, of which N_trained are trained.

    This is the usual 6 N + 6 L S q (PaLM, arXiv 2204.02311, appendix B; attention halved for the causal mask) less the weight
    gradients of foreign experts. N includes top_k experts per layer, of which the fraction `owned / E` is trained, and their
    low-rank terms, which are all trained; q is the width of all query heads.
    """
    layout, shape = sizes_of(model), shape_of(model)
    shared = _shared_products(model) + shape.vocab_size * shape.hidden_size
    routed = shape.top_k * layout.expert(0).size
    attention = 6 * shape.num_hidden_layers * sequence_length * shape.query_size
    hidden, inner = shape.hidden_size, shape.intermediate_size
    terms = model.moe_low_rank * (6 * (2 * inner + hidden) + 4 * (hidden + inner))  # B is trained, A is not
    low_rank = shape.num_hidden_layers * shape.top_k * terms
    return 6 * shared + (4 + 2 * len(owned) / shape.num_experts) * routed + low_rank + attention


def layers_forward_flops_per_token(model: ModelSection, sequence_length: int) -> float:
    """Return what activation checkpointing computes again: 2 N + 2 L S q, with N without the output head."""
    shape = shape_of(model)
    weights = _shared_products(model) + shape.top_k * sizes_of(model).expert(0).size
    return 2 * weights + 2 * shape.num_hidden_layers * sequence_length * shape.query_size


def _shared_products(model: ModelSection) -> int:
    """Weights of the layers' matrices that every token visits, without embedding, head and low-rank terms."""
    specs = (placed.spec for placed in sizes_of(model).tensors)
    return sum(s.size for s in specs if s.expert is None and s.layer is not None and len(s.shape) > 1 and not s.is_low_rank)


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's peak bf16 FLOP/s by its name; None if unknown."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)

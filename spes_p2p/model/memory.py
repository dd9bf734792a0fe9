"""Device memory of a peer's training in bytes, by formula, without allocating anything.

Weights, gradients, moments and stored experts are exact sums over the layout's tensors. Activations are what autograd saves in
one forward pass: T tokens of width H through L layers; Q and K: width of all query heads, of all key heads; F: width of one
expert; k experts per token; E experts, o of them owned; V: vocabulary; w = 4 bytes, 2 in bf16 autocast. Saved per layer, token:

    float32   4 (6 H + 4 Q + 4 K)
    bf16      4 (4 H + Q + K) + 2 (4 H + 3 Q + 3 K)
    both      w k (2 H + 3 F + F o / E + 2 r) + 12 E + 36 k + 4 heads       (1 H instead of 2 when nothing is owned)

the norms' inputs and outputs, attention's operands and result, then the experts' input, output, gated halves, the owned ones'
product, the narrow inputs of the low-rank terms of rank r, the router's probabilities and the indices. The last norm saves 8 H,
and the loss, which computes its gradients in the forward pass (training/head_loss.py), 4 H per token and 4 V H once; in bf16
the cast copies of all matrices except the experts and the head are also saved. With checkpointing, a layer saves its input,
4 H, and one layer at a time is complete.

Working memory is temporary: in the loss, logits of LOSS_CHUNK tokens (in bf16 in both widths) and a cast copy of the head; in a
layer, decoded experts, their gradient, twice that of their low-rank terms, and gradients of its activations; at the end of the
backward pass the gradient of the embedding, added to the head's if the two are tied; in AdamW's step, a square root of the
largest parameter group; in Muon's, bf16 copies of one matrix at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

from spes_p2p.config.campaign import ModelConfig
from spes_p2p.model.build import layout_of
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.model.prefetch import SLOTS
from spes_p2p.model.stored import StoredFormat, StoredPlace

DeviceKind = Literal["cuda", "cpu"]
OptimizerKind = Literal["adamw", "adamw8bit"]

LOSS_CHUNK = 512
"""Tokens whose logits exist at the same time (training/head_loss.py)."""
PRODUCT_ROWS = 8192
"""Block size, in rows of the head, of its gradient in bf16 (training/head_loss.py)."""

STORED_BYTES: dict[StoredFormat, int] = {"fp32": 4, "bf16": 2, "int8": 1}
SCALE_BYTES = 4
BLOCK_8BIT = 256
SMALLEST_8BIT = 4096
"""torchao keeps float32 moments for smaller tensors and for those that are not a multiple of the block size."""
MAP_8BIT_BYTES = 1024
"""Each 8-bit moment has a table of 256 float32 values."""


@dataclass(frozen=True)
class Setup:
    """Training options of one peer that affect its memory."""

    owned: int
    """Number of owned experts."""
    stored: StoredFormat
    optimizer: OptimizerKind
    micro_batch: int
    """Samples per forward pass."""
    device: DeviceKind = "cuda"
    bf16: bool = True
    """Autocast to bfloat16; otherwise float32 throughout."""
    stored_on: StoredPlace = "device"
    checkpointing: bool = False
    """Activation checkpointing."""
    muon: bool = False
    """Whether the campaign trains matrices of attention and experts with Muon."""


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes at the peak of a step, by kind."""

    weights: int
    """Trained float32 weights: shared, router, owned experts."""
    gradients: int
    moments: int
    stored: int
    """Foreign experts, and the fixed factors of all low-rank terms."""
    activations: int
    working: int

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


def device_bytes(model: ModelConfig, sequence_length: int, setup: Setup) -> DeviceBytes:
    """Return the device memory of training with this setup, which does not depend on which experts are owned."""
    layout = layout_of(model)
    shared, expert = shared_elements(layout), layout.expert(0).size
    trained = shared + setup.owned * expert
    activations, working = _Pass(model, sequence_length, setup).highest()
    optimizer_working = 4 * max(shared, expert)
    layers_there = min(SLOTS, model.num_hidden_layers) if setup.stored_on == "host" else model.num_hidden_layers
    return DeviceBytes(
        weights=4 * trained,
        gradients=4 * trained,
        moments=_moments_bytes(layout, None, setup.optimizer, setup.muon)
        + setup.owned * _moments_bytes(layout, 0, setup.optimizer, setup.muon),
        stored=stored_bytes(model, setup) * layers_there // model.num_hidden_layers + _directions_bytes(model),
        activations=activations,
        working=max(working, optimizer_working - activations),
    )


def shared_elements(layout: Layout) -> int:
    """Return the number of parameters that every peer trains: the shared weights and the router."""
    return sum(group.size for group in layout.groups if group.expert is None)


@lru_cache(maxsize=64)
def _moments_bytes(layout: Layout, expert: int | None, optimizer: OptimizerKind, muon: bool) -> int:
    """Moments of one expert, or (None) of all shared weights: two for AdamW, one in float32 for Muon."""
    specs = [t.spec for t in layout.tensors if t.spec.expert == expert]
    return sum(
        4 * spec.size if muon and is_muons(spec) else 2 * tensor_moment_bytes(spec.size, optimizer) for spec in specs
    )


def is_muons(spec: TensorSpec) -> bool:
    """Return whether Muon steps this tensor: a layer's matrix, but not embedding, output head, routers and vectors."""
    return spec.layer is not None and spec.kind != "router" and len(spec.shape) == 2


def tensor_moment_bytes(elements: int, optimizer: OptimizerKind) -> int:
    """Return the bytes of one of AdamW's two moments of a tensor."""
    if optimizer == "adamw" or elements < SMALLEST_8BIT or elements % BLOCK_8BIT:
        return 4 * elements
    return elements + SCALE_BYTES * (elements // BLOCK_8BIT) + MAP_8BIT_BYTES


def stored_bytes(model: ModelConfig, setup: Setup) -> int:
    """Return the bytes of all foreign experts, on the device or in host memory."""
    return (model.moe_num_experts - setup.owned) * stored_expert_bytes(layout_of(model), setup.stored)


@lru_cache(maxsize=16)
def stored_expert_bytes(layout: Layout, stored: StoredFormat) -> int:
    """Return the bytes of one foreign expert in all layers; int8 has a float32 scale per output channel."""
    tensors = [t.spec for t in layout.tensors_of(layout.expert(0))]
    scales = sum(SCALE_BYTES * spec.shape[0] for spec in tensors) if stored == "int8" else 0
    return STORED_BYTES[stored] * sum(spec.size for spec in tensors) + scales


def _directions_bytes(model: ModelConfig) -> int:
    return 4 * model.num_hidden_layers * model.moe_low_rank * (model.hidden_size + model.intermediate_size)


def saved_activation_bytes(model: ModelConfig, sequence_length: int, setup: Setup) -> int:
    """Return what autograd saves in one forward pass (module docstring)."""
    return _Pass(model, sequence_length, setup).saved()


class _Pass:
    """Activations and working memory of one forward and backward pass."""

    def __init__(self, model: ModelConfig, sequence_length: int, setup: Setup):
        self._model, self._setup = model, setup
        self._tokens = setup.micro_batch * sequence_length
        self._width = 2 if setup.bf16 else 4
        self._cast_copies = 2 * _multiplied_elements(layout_of(model)) if setup.bf16 else 0

    def saved(self) -> int:
        """Bytes saved at the end of the forward pass."""
        return self.layers_saved() + self.head_saved() + self._cast_copies

    def highest(self) -> tuple[int, int]:
        """Return (activations, working) bytes at the largest of three peaks: loss, backward pass of the last layer, of the
        embedding."""
        layer = self.layer_saved() if self._setup.checkpointing else 0
        tied = self._head() if self._model.tie_word_embeddings else 0
        peaks = (
            (self.saved(), self._loss_working()),
            (self.layers_saved() + self._cast_copies + layer, self._layer_working() + tied),
            (self._cast_copies, self._head() + tied),
        )
        return max(peaks, key=sum)

    def layers_saved(self) -> int:
        """Bytes saved by all layers at the end of the forward pass."""
        layer = 4 * self._model.hidden_size * self._tokens if self._setup.checkpointing else self.layer_saved()
        return self._model.num_hidden_layers * layer

    def layer_saved(self) -> int:
        """Bytes saved by one layer without checkpointing."""
        m, w = self._model, self._width
        hidden, queries, keys = m.hidden_size, m.hidden_size, m.hidden_size // m.num_attention_heads * m.num_key_value_heads
        if self._setup.bf16:
            attention = 4 * (4 * hidden + queries + keys) + 2 * (4 * hidden + 3 * queries + 3 * keys)
        else:
            attention = 4 * (6 * hidden + 4 * queries + 4 * keys)
        kept_input = hidden if self._setup.owned else 0
        share = self._setup.owned / m.moe_num_experts
        narrow = 2 * m.moe_low_rank
        experts = w * m.moe_top_k * (hidden + kept_input + (3 + share) * m.intermediate_size + narrow)
        router = 12 * m.moe_num_experts + 36 * m.moe_top_k + 4 * m.num_attention_heads
        return round(self._tokens * (attention + experts + router))

    def head_saved(self) -> int:
        """Bytes saved by the last norm, and the gradients that the loss computed."""
        return self._tokens * 12 * self._model.hidden_size + self._head()

    def _head(self) -> int:
        """Bytes of the head, of its gradient, or of the embedding's gradient."""
        return 4 * self._model.vocab_size * self._model.hidden_size

    def _loss_working(self) -> int:
        """Logits of a chunk, reused for their gradient; in bf16 also a bf16 copy of them and of the head, and row blocks."""
        logits = min(LOSS_CHUNK, self._tokens) * self._model.vocab_size
        if not self._setup.bf16:
            return 4 * logits
        pieces = min(PRODUCT_ROWS, self._model.vocab_size) * self._model.hidden_size
        return 6 * logits + self._head() // 2 + 6 * pieces

    def _layer_working(self) -> int:
        """Decoded foreign experts, or gradients of the owned ones (in bf16, then float32), and rows of the experts' inputs."""
        m, w, setup = self._model, self._width, self._setup
        matrix = w * 2 * m.intermediate_size * m.hidden_size
        # A CPU decodes one at a time (model/backends.py).
        foreign = min(1, m.moe_num_experts - setup.owned) if setup.device == "cpu" else m.moe_num_experts - setup.owned
        decoded = 0 if STORED_BYTES[setup.stored] == w else foreign
        rows = w * m.moe_top_k * self._tokens * (m.intermediate_size + m.hidden_size)
        terms = 4 * m.moe_num_experts * m.moe_low_rank * max(2 * m.intermediate_size, m.hidden_size)
        return matrix * max(decoded, (3 if setup.bf16 else 1) * setup.owned) + rows + 2 * terms


@lru_cache(maxsize=8)
def _multiplied_elements(layout: Layout) -> int:
    """Elements of the layers' matrices except the experts'; autocast makes a bf16 copy of each."""
    specs = (t.spec for t in layout.tensors)
    return sum(s.size for s in specs if s.expert is None and s.layer is not None and len(s.shape) == 2)

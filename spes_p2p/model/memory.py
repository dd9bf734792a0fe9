"""Device memory of a peer's training in bytes, by formula, without allocating anything.

Weights, gradients, moments and stored experts are exact sums over the layout's tensors; those that are never trained
(`build.py`) have neither gradients nor moments. Activations are what autograd saves in one forward pass: T tokens of width H
through L layers; Q and K: width of all query heads, of all key heads; n: Q + K if these are normalised, otherwise 0; F: width
of one expert; k experts per token; E experts, o of them owned; D: inputs and outputs of other matrices, such as a shared
expert's; V: vocabulary; w = 4 bytes, 2 in bf16 autocast. Saved per layer, token:

    float32   4 (6 H + 2 (Q + K) + 2 n)
    bf16      4 (4 H + n) + 2 (4 H + 2 (Q + K) + n)
    both      w k (2 H + 3 F + F o / E + 2 r) + w D + 12 E + 36 k + 4 heads       (1 H instead of 2 when nothing is owned)

the norms' inputs and outputs, attention's operands and result, then the experts' input, output, gated halves, the owned ones'
product, the narrow inputs of the low-rank terms of rank r, the router's probabilities and the indices. The last norm saves 8 H,
and the loss, which computes its gradients in the forward pass (training/head_loss.py), 4 H per token; in bf16 a layer also
saves cast copies of its matrices except the experts. Between documents that are kept apart, a layer of sequences of S tokens
saves the mask, and keys and values for each query head: w (S + 2 (Q - K)). With checkpointing, a layer saves its input, 4 H,
and one layer at a time is complete.

Working memory is temporary: in the loss, the last hidden states twice, logits of LOSS_CHUNK tokens (in bf16 in both widths) and
a cast copy of the head; in a layer, decoded experts, their gradient, twice that of their low-rank terms, and gradients of its
activations; at the end of the backward pass the gradient of the embedding; in AdamW's step with 8-bit moments, which it
decodes, or with corrected ones (`second_moment_peers`), two float32 copies of the largest tensor; in Muon's, copies of one
matrix, in bf16 on a GPU; between several devices, sums of BUCKET_ELEMENTS gradients at a time. Devices that divide the layers
have embedding, head and last norm each, with gradients, and of the layers their own and a copy of one other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

from spes_p2p.config.model import ModelSection
from spes_p2p.model.formats import SLOTS, StoredFormat, StoredPlace
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.model.shape import shape_of
from spes_p2p.model.sharding import ranks_of_layers, ranks_outside_layers
from spes_p2p.model.sizes import sizes_of

DeviceKind = Literal["cuda", "cpu"]
OptimizerKind = Literal["adamw", "adamw8bit"]

LOSS_CHUNK = 512
"""Tokens whose logits exist at the same time (training/head_loss.py)."""
PRODUCT_ROWS = 8192
"""Block size, in rows of the head, of its gradient in bf16 (training/head_loss.py)."""

BUCKET_ELEMENTS = 2**24
"""Gradients that ranks sum at a time (training/ranks.py)."""

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
    """Samples per forward pass, on each device."""
    device: DeviceKind = "cuda"
    bf16: bool = True
    """Autocast to bfloat16; otherwise float32 throughout."""
    stored_on: StoredPlace = "device"
    checkpointing: bool = False
    """Activation checkpointing."""
    muon: bool = False
    """Whether the campaign trains matrices of attention and experts with Muon."""
    corrected: bool = False
    """Whether the campaign corrects AdamW's second moments (`training.second_moment_peers`)."""
    masked: bool = False
    """Whether the campaign masks attention between documents (`training.intra_document_masking`)."""
    ranks: int = 1
    """Devices that divide a batch."""
    sharded: bool = False
    """Whether they divide weights, stored experts and moments too (`training/shards.py`); otherwise each has all."""


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes at the peak of a step, by kind."""

    weights: int
    """Float32 weights: shared, router, owned experts."""
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


def device_bytes(model: ModelSection, sequence_length: int, setup: Setup) -> DeviceBytes:
    """Return the device memory of training with this setup, which does not depend on which experts are owned."""
    if setup.sharded:
        return max((_of_rank(model, sequence_length, setup, rank) for rank in range(setup.ranks)), key=lambda each: each.total)
    layout = sizes_of(model)
    shared, expert = shared_elements(layout), layout.expert(0).size
    trained = shared + setup.owned * expert
    activations, working = ForwardBackwardPass(model, sequence_length, setup).highest()
    has_copies = setup.optimizer == "adamw8bit" or setup.corrected
    after_passes = 8 * layout.largest_tensor if has_copies else 0
    if setup.ranks > 1:
        after_passes = max(after_passes, 4 * BUCKET_ELEMENTS)
    layers = sum(any(spec.expert is not None for spec in specs) for specs in _by_layer(layout).values())
    layers_there = min(SLOTS, layers) if setup.stored_on == "host" else layers
    return DeviceBytes(
        weights=4 * trained,
        gradients=4 * (trained - sum(placed.spec.size for placed in layout.fixed)),
        moments=_moments_bytes(layout, None, setup.optimizer, setup.muon)
        + setup.owned * _moments_bytes(layout, 0, setup.optimizer, setup.muon),
        stored=stored_bytes(model, setup) * layers_there // layers + _directions_bytes(model),
        activations=activations,
        working=max(working, after_passes - activations),
    )


def _of_rank(model: ModelSection, sequence_length: int, setup: Setup, rank: int) -> DeviceBytes:
    """Return what one rank of several has that divide the layers: its own, and one of another while it computes that one.

    What is outside the layers is on all. Gradients of another rank's layer exist until they are sent to it.
    """
    layout = sizes_of(model)
    here = _layers_of(layout, setup.ranks, rank)
    copies = _largest_layer_of_others(layout, setup.ranks, rank, setup.owned, _stored_in_shares(setup))
    present = (None, *here, *copies)
    weights, _ = _held(layout, present, setup.owned, setup.optimizer, setup.muon)
    fixed = sum(spec.size for layer in present for spec in _by_layer(layout)[layer] if spec.is_fixed)
    _, moments = _held(layout, here, setup.owned, setup.optimizer, setup.muon)
    outside = [spec for spec in _by_layer(layout)[None] if ranks_outside_layers(layout, setup.ranks)[spec.name] == rank]
    whole = device_bytes(model, sequence_length, replace(setup, sharded=False))
    stored = _stored_in(layout, (*here, *copies), setup.owned, _stored_in_shares(setup)) + _directions_bytes(model)
    return replace(
        whole, weights=4 * weights, gradients=4 * (weights - fixed),
        moments=moments + sum(_tensor_moments(spec, setup.optimizer, setup.muon) for spec in outside),
        stored=whole.stored if setup.stored_on == "host" else stored,
    )


def host_shards_bytes(model: ModelSection, setup: Setup) -> int:
    """Return the main memory in which rank 0 has between phases what the other ranks have on their devices during one."""
    layout = sizes_of(model)
    there = tuple(layer for rank in range(1, setup.ranks) for layer in _layers_of(layout, setup.ranks, rank))
    trained, moments = _held(layout, there, setup.owned, setup.optimizer, setup.muon)
    outside = [spec for spec in _by_layer(layout)[None] if ranks_outside_layers(layout, setup.ranks)[spec.name] > 0]
    moments += sum(_tensor_moments(spec, setup.optimizer, setup.muon) for spec in outside)
    return 4 * trained + moments + _stored_in(layout, there, setup.owned, _stored_in_shares(setup))


def _stored_in_shares(setup: Setup) -> StoredFormat | None:
    """Return the format of foreign experts that ranks divide; None where they are in main memory."""
    return setup.stored if setup.stored_on == "device" else None


@lru_cache(maxsize=4096)
def _largest_layer_of_others(
    layout: Layout, ranks: int, rank: int, owned: int, stored: StoredFormat | None
) -> tuple[int | None, ...]:
    """Return the layer of another rank with the most weights, gradients and stored experts, if there is any."""
    others = [layer for layer, holder in ranks_of_layers(layout, ranks).items() if holder != rank]
    sizes = {
        layer: 8 * _held(layout, (layer,), owned, "adamw", False)[0] + _stored_in(layout, (layer,), owned, stored)
        for layer in others
    }
    return (max(others, key=lambda layer: sizes[layer]),) if others else ()


@lru_cache(maxsize=4096)
def _stored_in(layout: Layout, layers: tuple[int | None, ...], owned: int, stored: StoredFormat | None) -> int:
    """Return the bytes of the foreign experts of these layers in this format."""
    if stored is None:
        return 0
    specs = [spec for layer in layers for spec in _by_layer(layout)[layer] if spec.expert is not None]
    return (layout.num_experts - owned) * _encoded_bytes(specs, stored)


@lru_cache(maxsize=16)
def _by_layer(layout: Layout) -> dict[int | None, list[TensorSpec]]:
    """Return the tensors of each layer and (None) outside, of the experts those of the first."""
    found: dict[int | None, list[TensorSpec]] = {None: []}
    for placed in layout.tensors:
        if not placed.spec.expert:
            found.setdefault(placed.spec.layer, []).append(placed.spec)
    return found


@lru_cache(maxsize=64)
def _layers_of(layout: Layout, ranks: int, rank: int) -> tuple[int, ...]:
    return tuple(layer for layer, holder in ranks_of_layers(layout, ranks).items() if holder == rank)


@lru_cache(maxsize=4096)
def _held(
    layout: Layout, layers: tuple[int | None, ...], owned: int, optimizer: OptimizerKind, muon: bool
) -> tuple[int, int]:
    """Return the elements of these layers without foreign experts, and the bytes of their moments."""
    specs = [(spec, 1 if spec.expert is None else owned) for layer in layers for spec in _by_layer(layout)[layer]]
    moments = sum(count * _tensor_moments(spec, optimizer, muon) for spec, count in specs)
    return sum(count * spec.size for spec, count in specs), moments


def _tensor_moments(spec: TensorSpec, optimizer: OptimizerKind, muon: bool) -> int:
    """Moments of one tensor: two for AdamW, one in float32 for Muon, none if it is never trained."""
    if spec.is_fixed:
        return 0
    return 4 * spec.size if muon and is_muons(spec) else 2 * tensor_moment_bytes(spec.size, optimizer)


def shared_elements(layout: Layout) -> int:
    """Return the number of parameters that every peer has in full: the shared weights and the router."""
    return sum(group.size for group in layout.groups if group.expert is None)


@lru_cache(maxsize=64)
def _moments_bytes(layout: Layout, expert: int | None, optimizer: OptimizerKind, muon: bool) -> int:
    """Moments of one expert, or (None) of all shared weights."""
    return sum(_tensor_moments(t.spec, optimizer, muon) for t in layout.tensors if t.spec.expert == expert)


def is_muons(spec: TensorSpec) -> bool:
    """Return whether Muon steps this tensor: a layer's matrix, but not embedding, output head, routers and vectors."""
    return spec.layer is not None and spec.kind != "router" and len(spec.shape) == 2


def tensor_moment_bytes(elements: int, optimizer: OptimizerKind) -> int:
    """Return the bytes of one of AdamW's two moments of a tensor."""
    if optimizer == "adamw" or elements < SMALLEST_8BIT or elements % BLOCK_8BIT:
        return 4 * elements
    return elements + SCALE_BYTES * (elements // BLOCK_8BIT) + MAP_8BIT_BYTES


def stored_bytes(model: ModelSection, setup: Setup) -> int:
    """Return the bytes of all foreign experts, on the device or in host memory."""
    return (sizes_of(model).num_experts - setup.owned) * stored_expert_bytes(sizes_of(model), setup.stored)


@lru_cache(maxsize=16)
def stored_expert_bytes(layout: Layout, stored: StoredFormat) -> int:
    """Return the bytes of one foreign expert in all layers; int8 has a float32 scale per output channel."""
    return _encoded_bytes([t.spec for t in layout.tensors_of(layout.expert(0))], stored)


def _encoded_bytes(matrices: Sequence[TensorSpec], stored: StoredFormat) -> int:
    scales = sum(SCALE_BYTES * spec.shape[0] for spec in matrices) if stored == "int8" else 0
    return STORED_BYTES[stored] * sum(spec.size for spec in matrices) + scales


def _directions_bytes(model: ModelSection) -> int:
    shape = shape_of(model)
    return 4 * shape.num_hidden_layers * shape.low_rank * (shape.hidden_size + shape.intermediate_size)


class ForwardBackwardPass:
    """Activations and working memory of one forward and backward pass."""

    def __init__(self, model: ModelSection, sequence_length: int, setup: Setup):
        self._shape, self._setup = shape_of(model), setup
        self._tokens, self._sequence_length = setup.micro_batch * sequence_length, sequence_length
        self._width = 2 if setup.bf16 else 4
        self._cast_copies = 2 * _multiplied_elements(sizes_of(model)) // self._shape.num_hidden_layers if setup.bf16 else 0

    def saved(self) -> int:
        """Bytes saved at the end of the forward pass."""
        return self.layers_saved() + self.head_saved()

    def highest(self) -> tuple[int, int]:
        """Return (activations, working) bytes at the largest of three peaks: loss, backward pass of the last layer, of the
        embedding."""
        layer = self.layer_saved() if self._setup.checkpointing else 0
        peaks = (
            (self.saved(), self._loss_working()),
            (self.layers_saved() + layer, self._layer_working()),
            (0, self._vocabulary()),
        )
        return max(peaks, key=sum)

    def layers_saved(self) -> int:
        """Bytes saved by all layers at the end of the forward pass."""
        layer = 4 * self._shape.hidden_size * self._tokens if self._setup.checkpointing else self.layer_saved()
        return self._shape.num_hidden_layers * layer

    def layer_saved(self) -> int:
        """Bytes saved by one layer without checkpointing, with the cast copies of its matrices."""
        m, w = self._shape, self._width
        hidden, heads = m.hidden_size, m.query_size + m.key_size
        norms = heads if m.has_query_norm else 0
        if self._setup.bf16:
            attention = 4 * (4 * hidden + norms) + 2 * (4 * hidden + 2 * heads + norms)
        else:
            attention = 4 * (6 * hidden + 2 * heads + 2 * norms)
        attention += w * m.other_size
        if self._setup.masked:
            attention += w * (self._sequence_length + 2 * (m.query_size - m.key_size))
        kept_input = hidden if self._setup.owned else 0
        share = self._setup.owned / m.num_experts
        narrow = 2 * m.low_rank
        experts = w * m.top_k * (hidden + kept_input + (3 + share) * m.intermediate_size + narrow)
        router = 12 * m.num_experts + 36 * m.top_k + 4 * m.num_heads
        return round(self._tokens * (attention + experts + router)) + self._cast_copies

    def head_saved(self) -> int:
        """Bytes saved by the last norm, and the gradient of the hidden states that the loss computed."""
        return self._tokens * 12 * self._shape.hidden_size

    def _vocabulary(self) -> int:
        """Bytes of the head, or of the embedding's gradient."""
        return 4 * self._shape.vocab_size * self._shape.hidden_size

    def _loss_working(self) -> int:
        """Hidden states and a copy of them; logits of a chunk, reused for their gradient; in bf16 also a bf16 copy of those and
        of the head, and row blocks."""
        logits = min(LOSS_CHUNK, self._tokens) * self._shape.vocab_size
        hidden = 8 * self._shape.hidden_size * self._tokens
        if not self._setup.bf16:
            return hidden + 4 * logits
        pieces = min(PRODUCT_ROWS, self._shape.vocab_size) * self._shape.hidden_size
        return hidden + 6 * logits + self._vocabulary() // 2 + 6 * pieces

    def _layer_working(self) -> int:
        """Decoded foreign experts, or gradients of the owned ones (in bf16, then float32); gradients of the experts' rows and
        of the layer's output."""
        m, w, setup = self._shape, self._width, self._setup
        matrix = w * 2 * m.intermediate_size * m.hidden_size
        # A CPU decodes one at a time (model/backends.py).
        foreign = min(1, m.num_experts - setup.owned) if setup.device == "cpu" else m.num_experts - setup.owned
        decoded = 0 if STORED_BYTES[setup.stored] == w else foreign
        rows = w * m.top_k * self._tokens * (m.intermediate_size + m.hidden_size)
        terms = 4 * m.num_experts * m.low_rank * max(2 * m.intermediate_size, m.hidden_size)
        of_output = 4 * m.hidden_size * self._tokens
        return matrix * max(decoded, (3 if setup.bf16 else 1) * setup.owned) + rows + of_output + 2 * terms


@lru_cache(maxsize=8)
def _multiplied_elements(layout: Layout) -> int:
    """Elements of the layers' matrices except the experts'; autocast makes a bf16 copy of each."""
    specs = (t.spec for t in layout.tensors)
    return sum(s.size for s in specs if s.expert is None and s.layer is not None and len(s.shape) == 2)

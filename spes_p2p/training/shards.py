"""How the ranks of a peer hold its model: all of it each, or each a share (ZeRO stage 3, arXiv 1910.02054).

Divided, each layer belongs to one rank as a whole: its weights, the foreign experts stored for it, and its moments
(`model/sharding.py`). Foreign experts may be in main memory instead, which all ranks share (`shared_memory.py`, `prefetch.py`).
The others get a copy for as long as they compute the layer, once in the forward pass and once in the backward pass, where its
activations are recomputed; then all send their gradients to its rank, which alone steps it. Whole layers, not slices of each
matrix as in FSDP: so each optimizer steps the matrices that it would step on one device. Embedding, head and last norm are on
every rank; one of them has their moments, steps them and sends them to the others.

Between phases rank 0 has everything, the layers of others in main memory: what a round changes, held-out losses and checkpoints
concern no other rank. A phase begins with each rank's share, and ends with what it became.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.model.formats import Home
from spes_p2p.model.layout import Layout
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.model.sharding import rank_that_steps, ranks_of_layers, ranks_outside_layers
from spes_p2p.training.flat_model import FlatModel
from spes_p2p.training.optimizer import Moments, OwnedOptimizer
from spes_p2p.training.ranks import Ranks


class Replicas:
    """Every rank holds everything."""

    def __init__(self, model: FlatModel, optimizer: OwnedOptimizer, ranks: Ranks, shares_stored: bool = False):
        """`shares_stored`: rank 0 has stored experts in main memory, and the others map them during phases."""
        self._model, self._optimizer, self._ranks, self._shares_stored = model, optimizer, ranks, shares_stored

    def moments_here(self, moments: Moments) -> Moments:
        """Return those of all moments that this rank has during a phase."""
        return moments

    def begin(self) -> None:
        """Send what a phase begins with from rank 0 to the others: weights, stored experts, moments."""
        for parameter in self._model.weights.values():
            self._ranks.broadcast(parameter)
        if self._shares_stored:
            self._map_stored()
        for block in self._model.blocks.values() if not self._shares_stored else ():
            for tensor in block.stored_tensors():
                self._ranks.broadcast(tensor)
        for _, tensor in sorted(self._optimizer.moments().items()):
            self._ranks.broadcast(tensor)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self) -> None:
        """Sum over the ranks what a step's passes left to sum."""
        self._ranks.sum_gradients(self._model.weights.values())

    def over_ranks(self, square_norm: Tensor) -> Tensor:
        """Return the squared norm of all gradients, from that of the gradients here."""
        return square_norm

    def stepped(self) -> None:
        """Finish a step of the optimizer."""

    def end(self) -> None:
        """Send what the phase made of them back to rank 0, which alone has everything from then on."""
        if self._shares_stored:
            for block in self._model.blocks.values() if self._ranks.rank > 0 else ():
                block.unmap_stored()
            self._ranks.all_of(None)  # rank 0 waits: it may replace them at once, which frees what no other rank maps

    def _map_stored(self) -> None:
        blocks = self._model.blocks
        shared = self._ranks.all_of({name: block.shared_paths() for name, block in blocks.items()})[0]
        for name, block in blocks.items() if self._ranks.rank > 0 else ():
            block.map_stored(shared[name])


@dataclass
class _Layer:
    """A layer that all ranks compute and one holds."""

    holder: int
    blocks: list[PartitionedExperts]
    """Its experts, one block or none."""
    is_open: bool = False
    homes: list[Tensor] = field(default_factory=list)
    """What a rank that is not the holder has in place of the copies with which it computes."""


class Shards(Replicas):
    """Each rank holds a share. Its hooks open and close the layers, in the same order on all ranks."""

    def __init__(self, model: FlatModel, optimizer: OwnedOptimizer, ranks: Ranks, shares_stored: bool = False):
        """See Replicas. Stored experts that are not shared are divided, too."""
        super().__init__(model, optimizer, ranks, shares_stored)
        self._in_phase = self._in_backward = False
        self._outside = ranks_outside_layers(model.layout, ranks.count)
        self._layers: dict[int, _Layer] = {}
        for name, module in model.model.named_modules():
            if number := re.search(r"\.layers\.(\d+)$", name):
                self._divide(module, int(number[1]))

    def moments_here(self, moments: Moments) -> Moments:
        """See Replicas."""
        return {name: each for name, each in moments.items() if self._holder(_of(name)) == self._ranks.rank}

    @torch.no_grad()
    def begin(self) -> None:
        """See Replicas."""
        self._in_phase = True
        for number, layer in self._layers.items():
            for tensor in self._tensors(number):
                self._ranks.move(tensor, 0, layer.holder, self._model.device)
        for name in self._outside:
            self._ranks.broadcast(self._model.weights[name])
        if self._shares_stored:
            self._map_stored()
        for name, tensor in sorted(self._optimizer.moments().items()):
            self._ranks.move(tensor, 0, self._holder(_of(name)), self._model.device)

    def backward(self, loss: Tensor) -> None:
        """See Replicas."""
        self._in_backward = True
        try:
            super().backward(loss)
        finally:
            self._in_backward = False

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """See Replicas."""
        for name, holder in self._outside.items():
            self._collect_gradients([self._model.weights[name]], holder)

    def over_ranks(self, square_norm: Tensor) -> Tensor:
        """See Replicas."""
        return self._ranks.sum(square_norm.to(self._model.device))

    @torch.no_grad()
    def stepped(self) -> None:
        """See Replicas."""
        for name, holder in self._outside.items():
            self._ranks.broadcast(self._model.weights[name], holder)

    @torch.no_grad()
    def end(self) -> None:
        """See Replicas."""
        for number, layer in self._layers.items():
            for tensor in self._trained(number):
                self._ranks.move(tensor, layer.holder, 0, self._model.device)
        for held in self._ranks.all_of(self._optimizer.shapes()):
            if self._ranks.rank == 0:
                self._optimizer.make_room(held)
        for name, tensor in sorted(self._optimizer.moments().items()):
            self._ranks.move(tensor, self._holder(_of(name)), 0, self._model.device)
        super().end()
        self._in_phase = False

    def _divide(self, module: nn.Module, number: int) -> None:
        blocks = [each for each in module.modules() if isinstance(each, PartitionedExperts)]
        self._layers[number] = _Layer(ranks_of_layers(self._model.layout, self._ranks.count)[number], blocks)

        def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            self._open(number)
            return (_then(given[0], lambda: self._finish(number)), *given[1:])

        def after(module: nn.Module, given: Any, result: Any) -> Any:
            if not self._in_backward:
                self._close(number)
            if isinstance(result, tuple):  # with what needs no gradient, such as the positions that sparse attention chose
                return (_then(result[0], lambda: self._open(number)), *result[1:])
            return _then(result, lambda: self._open(number))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    @torch.no_grad()
    def _open(self, number: int) -> None:
        layer = self._layers[number]
        if layer.is_open:
            return
        layer.is_open = True
        is_here, tensors = layer.holder == self._ranks.rank, self._tensors(number)
        if not is_here:
            device = self._model.device
            layer.homes, tensors = tensors, [torch.empty(each.shape, dtype=each.dtype, device=device) for each in tensors]
        for tensor, home in zip(tensors, layer.homes or tensors, strict=True):
            if self._in_phase:
                self._ranks.broadcast(tensor, layer.holder)
            elif not is_here:
                tensor.copy_(home)
        if not is_here:
            self._use(number, tensors)

    @torch.no_grad()
    def _close(self, number: int) -> None:
        layer = self._layers[number]
        if layer.homes:
            self._use(number, layer.homes)
        layer.is_open, layer.homes = False, []

    @torch.no_grad()
    def _finish(self, number: int) -> None:
        """Send the gradients of a pass to the layer's holder, and close it."""
        layer = self._layers[number]
        self._collect_gradients([self._model.weights[name] for name in self._names(number)], layer.holder)
        self._close(number)

    def _collect_gradients(self, parameters: list[nn.Parameter], holder: int) -> None:
        self._ranks.sum_gradients(parameters, holder)
        if holder != self._ranks.rank:
            for parameter in parameters:
                parameter.grad = None

    def _holder(self, name: str) -> int:
        return rank_that_steps(self._model.layout, self._ranks.count, name)

    def _names(self, number: int) -> list[str]:
        """Return the layer's trained weights, in one order on all ranks."""
        specs = self._model.layout.by_name
        return [name for name in self._model.weights if specs[name].spec.layer == number]

    def _trained(self, number: int) -> list[Tensor]:
        """Return what holds a layer's trained weights: those outside its experts, then the owned experts' slabs."""
        slabs = [slab for block in self._layers[number].blocks for slab in block.slabs]
        return [*(parameter.data for parameter in self._outside_experts(number)), *slabs]

    def _tensors(self, number: int) -> list[Tensor]:
        """Return what holds a layer."""
        blocks = self._layers[number].blocks if not self._shares_stored else []
        return [*self._trained(number), *(tensor for block in blocks for tensor in block.stored_tensors())]

    def _use(self, number: int, tensors: list[Tensor]) -> None:
        """Let these tensors hold a layer, in the order of `_tensors`."""
        outside = self._outside_experts(number)
        for parameter, tensor in zip(outside, tensors, strict=False):
            parameter.data = tensor
        for block in self._layers[number].blocks:
            block.hold(tensors[len(outside) :])

    def _outside_experts(self, number: int) -> list[nn.Parameter]:
        specs = self._model.layout.by_name
        return [self._model.weights[name] for name in self._names(number) if specs[name].spec.expert is None]


def _then(hidden: Tensor, do: Callable[[], None]) -> Tensor:
    """Return hidden states whose gradient, once it is there, does this.

    The gradient of a layer's output is there before any within the layer, that of its input after all.
    """
    if not torch.is_grad_enabled():
        return hidden
    then: Tensor = _Then.apply(hidden, do)  # type: ignore[no-untyped-call]
    return then


class _Then(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


def home_of(ranks: Ranks, layout: Layout, layer: int | None) -> Home:
    """Return where a rank has a layer between its uses, or (None) what is outside the layers."""
    if layer is None or ranks_of_layers(layout, ranks.count)[layer] == ranks.rank:
        return "device"
    return "host" if ranks.rank == 0 else "absent"


def _of(moment: str) -> str:
    """Return the weights whose moment has this name."""
    return moment.partition("/")[2]

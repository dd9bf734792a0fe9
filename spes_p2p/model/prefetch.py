"""Prefetching foreign experts from host memory to the device, layer by layer.

The device holds copies of two layers. While one layer is computed, the next one in the direction of the pass (forward or
backward) is copied on a separate stream. Both copies are reused where the direction turns and when a checkpointed layer is
recomputed, so L layers cost 2 L - 4 copies per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_p2p.model.formats import SLOTS
from spes_p2p.model.stored import Matrices

FORWARD, BACKWARD = 1, -1

Layer = Mapping[str, Matrices]
"""One layer's stored matrices by name."""


@dataclass
class _Slot:
    """A layer's copy on the device."""

    layer: int
    matrices: dict[str, Matrices]
    ready: torch.cuda.Event | None
    """Event of the copy's completion; None if copies are synchronous."""


class LayerPrefetcher:
    """Copies of host-stored layers on one device. Layers are numbered in the order of `add`, the model's order."""

    def __init__(self, device: torch.device):
        self.copies = 0
        """Layers copied so far."""
        self._device = device
        self._layers: list[Layer] = []
        self._slots: list[_Slot] = []
        """Least recently used first."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def add(self) -> int:
        """Register a layer and return its number; `replace` sets its matrices."""
        self._layers.append({})
        return len(self._layers) - 1

    def replace(self, layer: int, matrices: Layer) -> None:
        """Set the layer's host matrices."""
        self.forget(layer)
        self._layers[layer] = matrices

    def forget(self, layer: int) -> None:
        """Wait for copies and drop the layer's copy, before its host memory is written."""
        if self._stream is not None:
            self._stream.synchronize()
        self._slots = [slot for slot in self._slots if slot.layer != layer]

    def use(self, layer: int, direction: int) -> Layer:
        """Return the layer's matrices on the device and start copying `layer + direction`. Valid until two others are used."""
        slot = self._find(layer) or self._copy(layer)
        self._slots.remove(slot)
        self._slots.append(slot)
        following = layer + direction
        if 0 <= following < len(self._layers) and self._find(following) is None:
            self._copy(following)
        if slot.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.ready)
        return slot.matrices

    def _find(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == layer), None)

    def _copy(self, layer: int) -> _Slot:
        """Start copying a layer into the least recently used slot."""
        freed = self._slots.pop(0).matrices if len(self._slots) >= SLOTS else {}
        target = {name: _like(matrices, freed.get(name), self._device) for name, matrices in self._layers[layer].items()}
        pairs = [
            pair for name, m in self._layers[layer].items() for pair in zip(target[name].tensors, m.tensors, strict=True)
        ]
        slot = _Slot(layer, target, self._run(pairs))
        self._slots.append(slot)
        self.copies += 1
        return slot

    def _run(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        if self._stream is None:
            for to, of in pairs:
                to.copy_(of)
            return None
        # What the slot held before may still be read by work that is queued on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        ready: torch.cuda.Event = self._stream.record_event()
        return ready


def _like(matrices: Matrices, freed: Matrices | None, device: torch.device) -> Matrices:
    """Return device memory for these matrices: the freed tensors if they have the same shapes."""
    if freed is not None and [t.shape for t in freed.tensors] == [t.shape for t in matrices.tensors]:
        return freed
    return Matrices(*(torch.empty_like(t, device=device, pin_memory=False) for t in matrices.tensors))

"""A model on one device whose weights are exchanged with the flat state."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.config.model import ModelSection
from spes_p2p.model.build import State, build_model, exact_expert, layout_of
from spes_p2p.model.formats import Home
from spes_p2p.model.layout import Group
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.training.device import selected
from spes_p2p.training.options import TrainingOptions

COPY_ELEMENTS = 2**20
"""Copy chunk size, in elements."""


class FlatModel:
    """Shared weights, routers and owned experts as parameters; the other experts are stored. See Trainer for its methods."""

    def __init__(
        self, config: ModelSection, base: State, owned: tuple[int, ...], device: str | torch.device, options: TrainingOptions,
        home_of: Callable[[int | None], Home] = lambda layer: "device", host_home: Home = "host",
    ):
        """`home_of`, `host_home`: see `build_model`.

        Raises UserError for options that this device or installation does not support.
        """
        self.layout, self.owned, self.device = layout_of(config), tuple(sorted(owned)), torch.device(device)
        stored = options.stored or ("fp32" if self.device.type == "cpu" else "bf16")
        with selected(self.device):
            self.model: PreTrainedModel = build_model(
                config, base, self.owned, stored, self.device, options.stored_on, options.backend, home_of, host_home
            )
        named = self.model.named_modules()
        self.blocks = {name: module for name, module in named if isinstance(module, PartitionedExperts)}
        self.weights = dict(sorted(self.model.named_parameters()))

    def load_base(self, base: State) -> None:
        """See Trainer."""
        for group in self.layout.groups:
            self.write(group, base[group.start : group.stop])

    def assign(self, owned: tuple[int, ...], base: State) -> None:
        """See Trainer."""
        self.owned = tuple(sorted(owned))
        with selected(self.device):
            for name, block in self.blocks.items():
                block.assign(self.owned, partial(exact_expert, base, self.layout, name))
        self.weights = dict(sorted(self.model.named_parameters()))

    def read(self, group: Group, start: int = 0, stop: int | None = None) -> State:
        """See Trainer."""
        values = np.empty((group.size if stop is None else stop) - start, np.float32)
        for place, weights in self._trained_views(group, start, start + values.size):
            torch.from_numpy(values[place]).copy_(weights)
        return values

    def add(self, group: Group, delta: State, start: int = 0) -> None:
        """See Trainer."""
        for place, weights in self._trained_views(group, start, start + delta.size):
            weights.add_(_tensor(delta[place]).to(weights.device))

    def refresh(self, group: Group, values: State) -> None:
        """See Trainer."""
        if group.expert is None or group.expert in self.owned:
            raise ValueError(f"{group.name} is trained here; only add() changes it")
        self.write(group, values)

    def write(self, group: Group, values: State) -> None:
        """See Trainer."""
        if group.expert is None or group.expert in self.owned:
            for start in range(0, group.size, COPY_ELEMENTS):
                stop = min(start + COPY_ELEMENTS, group.size)
                for place, weights in self._trained_views(group, start, stop):
                    weights.copy_(_tensor(values[start:stop][place]))
            return
        for placed in self.layout.tensors_of(group):
            expert, _, matrix = placed.spec.name.rpartition(".")
            block, _, _ = expert.rpartition(".")
            flat = _tensor(values[placed.start - group.start : placed.stop - group.start])
            self.blocks[block].write_foreign(group.expert, matrix, flat.view(placed.spec.shape))

    def _trained_views(self, group: Group, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (range within `[start, stop)`, flat view of the local weights) for elements `[start, stop)` of a group."""
        if group.expert is not None and group.expert not in self.owned:
            raise ValueError(f"{group.name} is not trained here; owned experts: {self.owned}")
        begin, end, tensors = group.start + start, group.start + stop, self.layout.tensors_of(group)
        for placed in tensors[bisect.bisect_right(tensors, begin, key=lambda placed: placed.stop) :]:
            if placed.start >= end:
                break
            a, b = max(begin, placed.start), min(end, placed.stop)
            weights = self.weights[placed.spec.name].detach().view(-1)
            yield slice(a - begin, b - begin), weights[a - placed.start : b - placed.start]


def _tensor(values: State) -> Tensor:
    """Convert to a tensor, without a copy if the array is writable."""
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

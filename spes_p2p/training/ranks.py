"""The ranks of one peer: processes with a device each, among which every step's samples are divided (data parallel).

Rank 0 is the peer. It alone reads samples, talks to other peers and has the state that counts: local weights, moments, ledger.
The other ranks, its followers, are told what to do over a pipe:

    Begin   a phase begins: own these experts and receive all weights and moments from rank 0
    Step    compute the gradients of your share of these samples, sum them over the ranks, and step the optimizer
    End     the steps are done

All ranks sum the same gradients and step the same moments, so their weights stay equal without being sent again until the next
phase; or each holds and steps a share of them (`shards.py`). Router statistics are summed in each forward pass: n ranks with
micro-batch m compute what one with n m computes, to rounding. Collectives run on NCCL between GPUs and on gloo between CPU
processes.

Nothing overlaps the sum of gradients, nor what moves between ranks that hold a share each.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from spes_p2p.model.memory import BUCKET_ELEMENTS
from spes_p2p.training.optimizer import Moments

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A rank that keeps the others waiting for longer is treated as dead. Ranks differ by seconds: they have equal shares."""


@dataclass(frozen=True)
class Begin:
    """The start of a phase."""

    owned: tuple[int, ...]
    averaged_peers: float
    ages: dict[str, int]
    """Age of each parameter group (`OwnedOptimizer.tensors`)."""
    moments: Moments
    """The other entries of `OwnedOptimizer.tensors`."""
    eos_token_id: int | None = None
    """Id that ends each document; None: documents are not kept apart."""


@dataclass(frozen=True)
class End:
    """The end of a phase's steps."""


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    samples: npt.NDArray[np.int64]
    """`[n, sequence_length]`: the samples of all ranks."""
    rate: float


Command = Begin | Step | End


class RankLost(Exception):
    """Another rank ended or does not answer."""


class Ranks:
    """The ranks of a peer as one of them sees them. This class alone is a peer with one device."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    def tell(self, command: Command) -> None:
        """Send a command from rank 0 to all others."""

    def check(self) -> None:
        """Raise the error of `lost` if the ranks are known to have come apart."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Do what all ranks do at the same time: after an error of one, none can go on."""
        yield

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place, and return the tensor."""
        if self.count > 1:
            with self.explained():
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite a contiguous tensor with that of one rank."""
        with self.explained():
            dist.broadcast(_as_bytes(tensor), source)

    def move(self, tensor: Tensor, source: int, target: int, device: torch.device) -> None:
        """Overwrite a contiguous tensor of one rank with that of another, from device to device. Others do nothing."""
        if source == target or self.rank not in (source, target) or tensor.numel() == 0:
            return
        passes_through = self.rank == target and tensor.device.type != device.type
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if passes_through else tensor.detach().to(device)
        with self.explained():
            if self.rank == source:
                dist.send(_as_bytes(moved), target)
            else:
                dist.recv(_as_bytes(moved), source)
        if passes_through:
            tensor.copy_(moved)

    def all_of(self, what: T) -> list[T]:
        """Return what each rank passes, by rank."""
        found: list[Any] = [None] * self.count
        with self.explained():
            dist.all_gather_object(found, what)
        return found

    def sum_gradients(self, parameters: Iterable[nn.Parameter], target: int | None = None) -> None:
        """Sum the gradients over the ranks, at all of them or at one; then others' are undefined.

        All ranks pass the same parameters in the same order.
        """
        if self.count == 1:
            return
        for bucket in buckets(parameters, BUCKET_ELEMENTS):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._sum_at(bucket[0], target)
                continue
            flat = self._sum_at(torch.cat([gradient.reshape(-1) for gradient in bucket]), target)
            for gradient, total in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _sum_at(self, tensor: Tensor, target: int | None) -> Tensor:
        if target is None:
            return self.sum(tensor)
        with self.explained():
            dist.reduce(tensor, target)
        return tensor

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise after this one of a collective or a pipe."""
        return RankLost(str(error))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise `lost` for an error of a collective or a pipe, and do neither where the ranks have come apart."""
        self.check()
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            raise self.lost(error) from error


ALONE = Ranks()


def meet(rank: int, count: int, device: torch.device, meeting: Path) -> None:
    """Connect the ranks, over loopback only. `meeting`: a new file on this machine. Waits for all of them."""
    # Both libraries take the interface from the environment only.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = FileStore(str(meeting), count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=COLLECTIVE_TIMEOUT)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def buckets(parameters: Iterable[nn.Parameter], elements: int) -> Iterator[list[Tensor]]:
    """Yield the gradients in lists of at most `elements`, or of one; zeros where a rank had no samples."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and size + parameter.numel() > elements:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter.grad)
        size += parameter.numel()
    if bucket:
        yield bucket

"""A model without some of its experts: routers send their tokens to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def without_experts(model: nn.Module, routers: Collection[str], experts: Sequence[int]) -> Iterator[None]:
    """While the block runs, the scores of these experts are -inf in each router, so that it chooses among the others.

    `routers`: names of the routers' weights `[E, H]`. A router that adds a bias to its scores only after a softmax may still
    choose them: callers check that nothing was routed there.
    """
    with _Masked({model.get_parameter(name).data_ptr() for name in routers}, experts):
        yield


class _Masked(TorchFunctionMode):
    """Masks the products with a router's weight, whichever class of transformers computes them."""

    def __init__(self, routers: Collection[int], experts: Sequence[int]):
        """`routers`: addresses of their weights."""
        super().__init__()
        self._routers, self._experts = routers, torch.tensor(experts, dtype=torch.int64)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear and args[1].data_ptr() in self._routers:
            return result.index_fill(-1, self._experts.to(result.device), -math.inf)
        return result

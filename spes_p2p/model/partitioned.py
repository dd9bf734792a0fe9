"""A layer's experts, split into owned ones, which this peer trains, and foreign ones, which it only stores.

Replaces the fused experts block of transformers, with the same arguments and results. Owned experts are Parameters, one per
expert and matrix, so that each has its own optimizer state. Foreign experts have neither weight gradients nor optimizer state.
In theory, forward + backward take (2 + owned / E) / 3 of the time with all experts trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.errors import UserError
from spes_p2p.model.backends import Backend, choose_backend
from spes_p2p.model.formats import Home, StoredFormat
from spes_p2p.model.gating import gate_of, join_weighted
from spes_p2p.model.low_rank import LowRank
from spes_p2p.model.prefetch import BACKWARD, FORWARD, LayerPrefetcher
from spes_p2p.model.stored import Matrices, StoredMatrices, allocate

MATRICES = ("gate_up_proj", "down_proj")
"""Names of an expert's matrices: `[2F, H]` and `[H, F]`."""

ExactRows = Callable[[int, str], Tensor]
"""(Expert, name of the matrix) -> its exact float32 values."""

Fetch = Callable[[int], Matrices]
"""Direction of the pass (FORWARD, BACKWARD) -> the matrices, on the device."""

_REFUSED = {
    "is_transposed": (True, "its matrices are stored transposed"),
    "is_concatenated": (False, "its gate and up projections are interleaved, not concatenated"),
    "has_bias": (True, "its experts have biases"),
    "has_gate": (False, "its experts have no gate projection"),
    "has_post_expert_norm": (True, "it normalises each expert's output"),
}


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each fused experts block of a transformers model, in the model's order.

    Raises UserError, naming class and reason, for matrices other than `gate_up_proj [E, 2F, H]` and `down_proj [E, H, F]`.
    """
    found = False
    for name, module in model.named_modules():
        if not (name.endswith(".experts") and hasattr(module, "num_experts")):
            continue
        reasons = [why for flag, (bad, why) in _REFUSED.items() if getattr(module, flag, not bad) == bad]
        if not reasons and {n for n, _ in module.named_parameters()} != set(MATRICES):
            reasons = [f"its parameters are not just {' and '.join(MATRICES)}"]
        if not reasons and not _is_plain(*(module.get_parameter(name).shape for name in MATRICES)):
            reasons = ["its matrices are not [E, 2F, H] and [E, H, F]"]
        if reasons:
            raise UserError(f"{type(module).__name__}: its experts cannot be partitioned: {' and '.join(reasons)}; "
                            "use a supported class such as olmoe or qwen3_moe")
        found = True
        yield name, module
    if not found:
        raise UserError(f"{type(model).__name__}: has no experts that can be partitioned; use a mixture-of-experts model")


def _is_plain(gate_up: torch.Size, down: torch.Size) -> bool:
    experts, hidden_size, intermediate_size = down
    return gate_up == (experts, 2 * intermediate_size, hidden_size)


class _Expert(nn.Module):
    """One owned expert of one layer. Its Parameters are views of the layer's slabs."""

    def __init__(self, matrices: dict[str, Tensor]):
        super().__init__()
        for name, values in matrices.items():
            self.register_parameter(name, nn.Parameter(values))


class PartitionedExperts(nn.Module):
    """Experts block whose owned experts are trained and whose foreign experts are stored.

    Parameters are named as in the layout: `{expert}.gate_up_proj` and `{expert}.down_proj`, and for all experts' low-rank terms
    `low_rank.gate_up_proj` and `low_rank.down_proj`. When owners change, a kept expert's Parameters stay the same objects and
    keep their optimizer state. Owned matrices are adjacent in a slab `[owned, ...]`: grouped GEMM needs no gathering.
    """

    order: Tensor
    """`[E]`: the owned experts, then the foreign ones."""
    slot: Tensor
    """`[E]`: each expert's index in `order`."""

    def __init__(
        self,
        block: nn.Module,
        owned: Iterable[int],
        stored: StoredFormat,
        device: torch.device,
        exact: ExactRows,
        backend: Backend | None = None,
        prefetcher: LayerPrefetcher | None = None,
        home: Home = "device",
        stored_home: Home = "device",
    ):
        """`block` is the transformers block to replace; only its shapes and gate are used, so it may be on the meta device.

        `home` and `stored_home`: where owned and foreign experts are between uses. A `prefetcher` takes foreign ones from main
        memory to `device`. The default backend is that of `auto`.
        """
        super().__init__()
        self.num_experts: int = int(block.get_parameter("gate_up_proj").shape[0])
        self.stored = stored
        self.owned: tuple[int, ...] = ()
        self.foreign: tuple[int, ...] = ()
        self.routed: Tensor | None = None
        """`[E]` int64: assignments to each expert in the last forward pass."""
        self._shapes = {name: block.get_parameter(name).shape[1:] for name in MATRICES}
        self._gate = gate_of(block)
        _, hidden_size, intermediate_size = block.get_parameter("down_proj").shape
        self._backend = backend or choose_backend("auto", device, hidden_size, intermediate_size)
        self._prefetcher, self._home, self._stored_home = prefetcher, home, stored_home
        self._layer = prefetcher.add() if prefetcher is not None else 0
        self._slabs: dict[str, Tensor] = {}
        self.low_rank: LowRank | None = None
        """Low-rank terms of all experts, trained here regardless of owners."""
        self._stores = nn.ModuleDict()
        self.register_buffer("order", None, persistent=False)
        self.register_buffer("slot", torch.empty(self.num_experts, dtype=torch.int64, device=device), persistent=False)
        self.assign(owned, exact)

    @torch.no_grad()
    def assign(self, owned: Iterable[int], exact: ExactRows) -> None:
        """Set the owned experts. Kept ones keep their values; newly owned and newly foreign ones take the exact values."""
        owned = tuple(sorted(owned))
        foreign = tuple(e for e in range(self.num_experts) if e not in owned)
        stores = {name: self._new_store(name, foreign, exact) for name in MATRICES}
        slabs = {name: self._new_slab(name, owned, exact) for name in MATRICES}
        for expert in set(self.owned) - set(owned):
            delattr(self, str(expert))
        for expert in set(owned) - set(self.owned):
            self.add_module(str(expert), _Expert({name: slabs[name][owned.index(expert)] for name in MATRICES}))
        self.owned, self.foreign, self._slabs, self._stores = owned, foreign, slabs, nn.ModuleDict(stores)
        self._link()
        self._prefetch_anew()
        self.order = torch.tensor(owned + foreign, device=self.slot.device)
        self.slot[self.order] = torch.arange(self.num_experts, device=self.slot.device)

    def add_low_rank(self, block: str, rank: int) -> None:
        """Add a low-rank term to each expert's matrices; `block` is this module's name in the model."""
        self.low_rank = LowRank(block, self._shapes, self.num_experts, rank, self._backend, self.slot.device)

    @torch.no_grad()
    def write_foreign(self, expert: int, name: str, values: Tensor) -> None:
        """Store new float32 values of one matrix of a foreign expert. Raises ValueError if the expert is owned."""
        index = self.foreign.index(expert)
        if self._prefetcher is not None:
            self._prefetcher.forget(self._layer)
        self._store(name).write(index, values)

    def shared_paths(self) -> list[str]:
        """Return where other processes can map the tensors that store foreign experts; none where they are not shared."""
        return [shared.path for name in MATRICES if (shared := self._store(name).shared) is not None]

    def map_stored(self, paths: Sequence[str]) -> None:
        """Use the foreign experts that another process with the same owned ones shares, until `unmap_stored`."""
        for name, path in zip(MATRICES, paths, strict=True):
            self._store(name).map(path)
        self._prefetch_anew()

    def unmap_stored(self) -> None:
        """Let go of them, after copies to the device that are under way."""
        for name in MATRICES:
            self._store(name).unmap()
        self._prefetch_anew()

    def _prefetch_anew(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.replace(self._layer, {name: self._store(name).matrices for name in MATRICES})

    def stored_tensors(self) -> list[Tensor]:
        """Return the tensors that store foreign experts."""
        return [tensor for name in MATRICES for tensor in self._store(name).matrices.tensors]

    @property
    def slabs(self) -> list[Tensor]:
        """The tensors that hold owned experts."""
        return list(self._slabs.values())

    @torch.no_grad()
    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Let these tensors hold the experts from now on, in place of `slabs`, and if there are more of `stored_tensors`."""
        given = iter(tensors)
        self._slabs = {name: next(given) for name in self._slabs}
        self._link()
        rest = list(given)
        for name in MATRICES if rest else ():
            store = self._store(name)
            count = len(store.matrices.tensors)
            store.hold(rest[:count])
            del rest[:count]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs: hidden `[T, H]`, index and weights `[T, k]` -> `[T, H]`."""
        top_k = top_k_index.shape[1]
        slots, order = torch.sort(self.slot[top_k_index.reshape(-1)])  # [T * k]
        ends = torch.searchsorted(slots, torch.arange(self.num_experts, device=slots.device), right=True, out_int32=True)
        self.routed = torch.diff(ends, prepend=ends.new_zeros(1)).long()[self.slot]
        dtype = hidden_states.dtype
        if torch.is_autocast_enabled(hidden_states.device.type):
            dtype = torch.get_autocast_dtype(hidden_states.device.type)
        token, place = order // top_k, torch.empty_like(order)  # [T * k]
        place[order] = torch.arange(order.numel(), device=order.device)
        sorted_hidden: Tensor = _Dispatch.apply(hidden_states, token, place)  # type: ignore[no-untyped-call]
        output = self._experts(sorted_hidden.to(dtype), ends, top_k_weights.reshape(-1)[order])  # [T * k, H]
        collected: Tensor = _Collect.apply(output, token, place, len(top_k_index))  # type: ignore[no-untyped-call]
        return collected.to(hidden_states.dtype)

    def _experts(self, hidden: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """Apply each row's expert and multiply by its weight: `[S, H]`, `[E]`, `[S]` -> `[S, H]`."""
        count = len(self.owned)
        if count == 0:
            return self._foreign_experts(hidden, ends) * weights[:, None]
        if count == self.num_experts:
            return self._owned_experts(hidden, ends) * weights[:, None]
        # The block's only host synchronisation: the number of rows of owned experts.
        split = int(ends[count - 1])
        # The gradients of two slices would each be as large as all rows.
        for_owned, for_foreign = hidden.split_with_sizes((split, hidden.shape[0] - split))
        owned = self._owned_experts(for_owned, ends[:count])
        return join_weighted(owned, self._foreign_experts(for_foreign, ends[count:] - split), weights)

    def _owned_experts(self, hidden: Tensor, ends: Tensor) -> Tensor:
        for name in MATRICES:
            parameters = [self.get_parameter(f"{expert}.{name}") for expert in self.owned]
            hidden = self._product(name, hidden, ends, partial(self._fetch_owned, name), *parameters)
            hidden = self._gate(hidden) if name == MATRICES[0] else hidden
        return hidden

    def _foreign_experts(self, hidden: Tensor, ends: Tensor) -> Tensor:
        gated = self._gate(self._product(MATRICES[0], hidden, ends, partial(self._fetch_foreign, MATRICES[0])))
        return self._product(MATRICES[1], gated, ends, partial(self._fetch_foreign, MATRICES[1]))

    def _product(self, name: str, hidden: Tensor, ends: Tensor, fetch: Fetch, *parameters: Tensor) -> Tensor:
        result: Tensor = _ExpertLinear.apply(hidden, ends, self._backend, fetch, *parameters)  # type: ignore[no-untyped-call]
        if self.low_rank is None:
            return result
        first = 0 if parameters else len(self.owned)
        return result.add_(self.low_rank(name, hidden, ends, self.order[first : first + len(ends)]))

    def _fetch_owned(self, name: str, direction: int) -> Matrices:
        return Matrices(self._slabs[name])

    def _fetch_foreign(self, name: str, direction: int) -> Matrices:
        return self._store(name).matrices if self._prefetcher is None else self._prefetcher.use(self._layer, direction)[name]

    def _store(self, name: str) -> StoredMatrices:
        store = self._stores[name]
        assert isinstance(store, StoredMatrices)
        return store

    def _new_store(self, name: str, foreign: tuple[int, ...], exact: ExactRows) -> StoredMatrices:
        store = StoredMatrices(len(foreign), self._shapes[name], self.stored, self.slot.device, self._stored_home)
        for index, expert in enumerate(foreign if self._stored_home != "absent" else ()):
            if expert in self.foreign:
                store.copy(index, self._store(name), self.foreign.index(expert))
            else:
                store.write(index, exact(expert, name))
        return store

    def _new_slab(self, name: str, owned: tuple[int, ...], exact: ExactRows) -> Tensor:
        slab = allocate((len(owned), *self._shapes[name]), self.slot.device, self._home)
        for index, expert in enumerate(owned if self._home != "absent" else ()):
            slab[index].copy_(self.get_parameter(f"{expert}.{name}") if expert in self.owned else exact(expert, name))
        return slab

    def _link(self) -> None:
        """Make each owned Parameter a view of its row of the slab."""
        for name, slab in self._slabs.items():
            for index, expert in enumerate(self.owned):
                self.get_parameter(f"{expert}.{name}").data = slab[index]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PartitionedExperts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._slabs = {name: fn(slab) for name, slab in self._slabs.items()}
        self._link()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._link()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise RuntimeError("this model has exact values of its owned experts only; export the base instead (model/export.py)")


class _Dispatch(torch.autograd.Function):
    """Rows of tokens `[T, H]` -> rows of assignments `[T * k, H]`, sorted by expert.

    `token` is each row's token, `place` each assignment's row. With both, gradients need no scatter-add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.tokens = x.shape[0]
        return x[token]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_assignments(grad, ctx.saved_tensors[0], ctx.tokens), None, None


class _Collect(torch.autograd.Function):
    """The inverse of _Dispatch: sum the rows of each token's assignments, `[T * k, H]` -> `[T, H]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token)
        return _sum_assignments(rows, place, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[ctx.saved_tensors[0]], None, None, None


def _sum_assignments(rows: Tensor, place: Tensor, tokens: int) -> Tensor:
    return rows[place].view(tokens, -1, rows.shape[1]).sum(dim=1)


class _ExpertLinear(torch.autograd.Function):
    """y = x W^T for rows sorted by expert; those of matrix i end at `ends[i]`.

    Saves the function that fetches the matrices, not decoded matrices. If Parameters are given, the backward pass adds their
    gradients to their `grad`, of all in one operation; autograd, which would convert and add each by itself, sees none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, backend: Backend, fetch: Fetch, *parameters: Tensor) -> Tensor:
        ctx.backend, ctx.fetch, ctx.parameters = backend, fetch, parameters
        ctx.save_for_backward(ends, *([x] if parameters else []))
        return backend.outputs(x, fetch(FORWARD), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends, *saved = ctx.saved_tensors
        backend, grad = ctx.backend, grad.contiguous()
        grad_x = backend.input_gradient(grad, ctx.fetch(BACKWARD), ends) if ctx.needs_input_grad[0] else None
        if any(ctx.needs_input_grad[4:]):
            _add_gradients(ctx.parameters, backend.weight_gradients(grad, saved[0], ends))
        return grad_x, None, None, None, *(None for _ in ctx.parameters)


def _add_gradients(parameters: Sequence[Tensor], gradients: Tensor) -> None:
    """Add row i of `gradients` to `parameters[i].grad`. Where there was none, all are rows of one array."""
    there = [parameter.grad for parameter in parameters]
    if all(each is None for each in there):
        for parameter, row in zip(parameters, gradients.to(parameters[0].dtype), strict=True):
            parameter.grad = row
    elif (whole := _array_of(there)) is not None:
        whole.add_(gradients)
    else:
        for parameter, row in zip(parameters, gradients.to(parameters[0].dtype), strict=True):
            parameter.grad = row.clone() if parameter.grad is None else parameter.grad.add_(row)


def _array_of(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Return the array `[G, ...]` whose rows these are, in order and without others; None if there is no such array."""
    first = rows[0]
    if first is None or first.untyped_storage().nbytes() != len(rows) * first.nbytes or not first.is_contiguous():
        return None
    if any(row is None or row.data_ptr() != first.data_ptr() + i * first.nbytes for i, row in enumerate(rows)):
        return None
    return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))

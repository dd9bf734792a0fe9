"""The tensors of a model's Hugging Face checkpoint, and where their values are in the flat state.

Families name and split their experts differently on disk (`mlp.experts.0.gate_proj.weight` in OLMoE,
`block_sparse_moe.experts.0.w1.weight` in Mixtral). transformers knows these conversions; they are learned from it by converting
small tensors whose values say what they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.build import empty_model, layout_of
from spes_p2p.model.layout import Layout
from spes_p2p.model.partitioned import MATRICES, expert_blocks


@dataclass(frozen=True)
class Piece:
    """Adjacent rows of one tensor of the layout: the range `[start, stop)` of the flat state."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the checkpoint. Its values in C order are those of the pieces, one after the other."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@lru_cache(maxsize=4)
def file_tensors(model: ModelSection) -> tuple[FileTensor, ...]:
    """Return the tensors of the model's checkpoint. Raises UserError for a family whose conversion is not a plain one."""
    empty, layout = empty_model(model), layout_of(model)
    blocks = {name for name, _ in expert_blocks(empty)}
    units: list[tuple[Piece, tuple[int, int]]] = []
    """The smallest ranges that a family may separate, with the shape of their matrices."""
    given: dict[str, Tensor] = {}
    for name, parameter in empty.named_parameters():
        block, _, matrix = name.rpartition(".")
        if block not in blocks:
            given[name] = parameter
            continue
        halves = 2 if matrix == MATRICES[0] else 1
        numbers = torch.arange(parameter.shape[0] * halves) + len(units)
        # Each unit is two by three equal numbers: some versions of transformers drop dimensions of 1.
        given[name] = numbers.view(-1, halves, 1).repeat_interleave(2, 1).expand(-1, -1, 3)
        rows, columns = parameter.shape[1] // halves, parameter.shape[2]
        for expert in range(parameter.shape[0]):
            whole = layout.by_name[f"{block}.{expert}.{matrix}"]
            for half in range(halves):
                start = whole.start + half * rows * columns
                units.append((Piece(whole.spec.name, start, start + rows * columns), (rows, columns)))
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in given.items() if tensor.is_meta}
    found = []
    for name, tensor in revert_weight_conversion(empty, dict(given)).items():
        if tensor.is_meta:
            found.append(_renamed(name, tensor, owners, given, layout))
        else:
            found.append(_separated(name, tensor, units))
    if sum(each.size for each in found) != layout.size - sum(t.spec.size for t in layout.tensors if t.spec.is_low_rank):
        raise _unknown(model.architecture)
    return tuple(found)


def _renamed(name: str, tensor: Tensor, owners: dict[int, str], given: dict[str, Tensor], layout: Layout) -> FileTensor:
    """Return a tensor that has another name in the file, at most."""
    owner = owners.get(tensor.untyped_storage()._cdata)
    if owner is None or (tensor.shape, tensor.stride()) != (given[owner].shape, given[owner].stride()):
        raise _unknown(name)
    placed = layout.by_name[owner]
    return FileTensor(name, placed.spec.shape, (Piece(owner, placed.start, placed.stop),))


def _separated(name: str, numbers: Tensor, units: list[tuple[Piece, tuple[int, int]]]) -> FileTensor:
    """Return a tensor of experts, given the numbers `[..., 2 m, 3]` of its units."""
    if numbers.ndim < 2:
        raise _unknown(name)
    unit_of = numbers[..., ::2, :1]
    if not torch.equal(unit_of.repeat_interleave(2, -2).repeat_interleave(3, -1), numbers):
        raise _unknown(name)
    chosen = [units[number] for number in unit_of.flatten().tolist()]
    rows, columns = chosen[0][1]
    if any(shape != (rows, columns) for _, shape in chosen):
        raise _unknown(name)
    pieces: list[Piece] = []
    for piece, _ in chosen:
        if pieces and (pieces[-1].tensor, pieces[-1].stop) == (piece.tensor, piece.start):
            piece = Piece(piece.tensor, pieces.pop().start, piece.stop)
        pieces.append(piece)
    return FileTensor(name, (*unit_of.shape[:-2], unit_of.shape[-2] * rows, columns), tuple(pieces))


def _unknown(what: str) -> UserError:
    return UserError(f"{what}: transformers stores this family's weights in a form that cannot be read in parts; "
                     "use a supported family such as olmoe, qwen3_moe or mixtral")

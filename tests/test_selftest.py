"""Replicated arithmetic gives the known bits here, and a machine that flushes denormals or loses a zero's sign is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from spes_p2p.errors import UserError
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds import selftest
from spes_p2p.rounds.apply import next_base_pieces
from spes_p2p.rounds.codecs import CODECS, GroupCodecs
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.planned import Member


def test_this_machine_computes_the_known_answer() -> None:
    selftest.check_arithmetic()


def wrong_machine(spoil: str) -> Callable[..., Iterator[np.ndarray]]:
    """An outer step that ends with other bits."""

    def spoiled(*args: Any) -> Iterator[np.ndarray]:
        (new,) = next_base_pieces(*args)
        if spoil == "denormals become zero":
            tiny = np.abs(new) < np.float32(2.0**-126)
            new[tiny] = np.copysign(np.float32(0.0), new[tiny])
        else:
            new += np.float32(0.0)
        yield new

    return spoiled


@pytest.mark.parametrize("spoil", ["denormals become zero", "a negative zero loses its sign"])
def test_a_machine_that_computes_otherwise_must_not_join(spoil: str) -> None:
    with pytest.raises(UserError, match="arithmetic differs"):
        selftest.check_arithmetic(wrong_machine(spoil))


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_the_outer_step_keeps_denormals_and_the_sign_of_zero(name: str) -> None:
    layout = Layout([TensorSpec("shared", (8,), "shared")])
    codec = CODECS[name]
    (part,) = part_table(layout, (Member("A", 1, (), 1.0),), GroupCodecs(codec, codec, codec), 1024)
    smallest, negative_zero = np.float32(1e-45), np.float32(-0.0)
    base = np.array([smallest, -smallest, negative_zero, 0.0, 2.0**-149, 2.0**-127, 1.0, -1.0], np.float32)
    update = np.array([0.0, 0.0, negative_zero, negative_zero, 0.0, 0.0, 2.0**-24, -(2.0**-24)], np.float32)
    (new,) = next_base_pieces(base, layout, [part], {0: codec.encode(update)}, None)
    expected = np.array([smallest, -smallest, negative_zero, 0.0, 2.0**-149, 2.0**-127, 1.0, -1.0], np.float32)
    assert new.tobytes() == expected.tobytes()
    assert new is not base

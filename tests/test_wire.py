"""Records on the wire: the same record gives the same bytes, and nothing but a record's bytes is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.data.slices import Cursor, Interval
from spes_p2p.swarm import coordinator, electors, node, records
from spes_p2p.swarm.wire import WireError, pack, record_id, unpack
from spes_p2p.sync import exchange, replica, snapshot

RECORDS: list[type[Any]] = [
    Interval, Cursor,
    *(cls for module in (records, electors, coordinator, node, exchange, replica, snapshot) for cls in vars(module).values()
      if dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls.__module__ == module.__name__),
]
NOT_RECORDS = {node.Hooks, replica.Applied, snapshot.Offer}
RECORDS = [cls for cls in dict.fromkeys(RECORDS) if cls not in NOT_RECORDS]

NUMBERS = st.integers(-(2**63), 2**64 - 1)
st.register_type_strategy(int, NUMBERS)
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(max_size=20))


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_record_round_trips(cls: type[Any], data: st.DataObject) -> None:
    record = data.draw(st.from_type(cls))
    packed = pack(record)
    assert unpack(cls, packed) == record
    assert pack(unpack(cls, packed)) == packed
    assert record_id(unpack(cls, packed)) == record_id(record)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=30, deadline=None)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_a_wire_error_and_nothing_else(cls: type[Any], garbage: bytes) -> None:
    read_or_wire_error(cls, garbage)


PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_fields_of_wrong_types_are_a_wire_error_and_nothing_else(cls: type[Any], data: st.DataObject) -> None:
    fields = msgpack.unpackb(pack(data.draw(st.from_type(cls))))
    place = data.draw(st.integers(0, len(fields) - 1))
    fields[place] = data.draw(PLAIN)
    read_or_wire_error(cls, msgpack.packb(fields))


def read_or_wire_error(cls: type[Any], data: bytes) -> None:
    try:
        record = unpack(cls, data)
    except WireError:
        return
    assert pack(record) == data


HEAD_BYTES = pack(records.Contact("c", 1, "trainer", 3, "h", ("/ip4/1.2.3.4",)))


@pytest.mark.parametrize("length", range(len(HEAD_BYTES)))
def test_a_truncated_record_is_a_wire_error(length: int) -> None:
    with pytest.raises(WireError):
        unpack(records.Contact, HEAD_BYTES[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD_BYTES + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\x7f\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x91" * 5000 + b"\xc0",
        b"\xc7\x0c\xff" + bytes(12),
        b"\xd4\x05\x00",
        msgpack.packb(["c", 1, "trainer", 3, "h", ["a"] * 10**5, "more"]),
        msgpack.packb(["c", "1", "trainer", 3, "h", []]),
        msgpack.packb(["c", 1.0, "trainer", 3, "h", []]),
        msgpack.packb(["c", True, "trainer", 3, "h", []]),
        msgpack.packb([b"c", 1, "trainer", 3, "h", []]),
        msgpack.packb(["c", 1, "trainer", 3, "h", {"a": 1}]),
        msgpack.packb({"campaign": "c"}),
        b"\x96\xa1\xff\x01\xa7trainer\x03\xa1h\x90",
    ],
    ids=range(18),
)
def test_bytes_that_claim_too_much_or_mean_something_else_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(records.Contact, data)


def test_one_meaning_has_one_form_of_bytes() -> None:
    """A longer encoding of the same number would be the same record under another id."""
    interval = Interval(0, 1, 2)
    assert pack(interval) == b"\x93\x00\x01\x02"
    with pytest.raises(WireError, match="canonical"):
        unpack(Interval, b"\x93\x00\xcc\x01\x02")

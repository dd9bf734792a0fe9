"""Records on the wire: the same record gives the same bytes, and nothing but a record's bytes is read."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from annotated_types import Ge, Le, MaxLen, Predicate
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p import messages
from spes_p2p.messages import consensus, content, fields, presence, refusals, rounds, samples
from spes_p2p.messages.codec import (
    SHARED_BYTES,
    SHARED_LARGE,
    Extensible,
    WireError,
    _plain,
    pack,
    pack_list,
    record_id,
    share_records,
    unpack,
    unpack_first,
)
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, Decide, Signed
from spes_p2p.messages.samples import Cursor, Interval

EXAMPLES_OF_EACH_RECORD = max(5, settings().max_examples // 5)
"""There are many records."""

NO_RECORDS = ("codec", "fields", "framing", "methods")
MODULES = [
    importlib.import_module(f"{messages.__name__}.{each.name}") for each in pkgutil.iter_modules(messages.__path__)
    if each.name not in NO_RECORDS
]
RECORDS: list[type[Any]] = [
    cls for module in MODULES for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
    and cls is not presence.PeerStatus
]
"""PeerStatus is a mapping, which `tests/test_observe.py` reads."""

NUMBERS = st.integers(-(2**63), 2**64 - 1)
st.register_type_strategy(int, NUMBERS)
st.register_type_strategy(float, st.floats(-1e15, 1e15))
st.register_type_strategy(str, st.text(st.characters(exclude_categories=("C", "Z")), max_size=20))


PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


def bounds_missing(hint: Any) -> bool:
    """Is there a number, text or list in this type that may be of any size?"""
    if get_origin(hint) is Annotated:
        inner, *bounds = get_args(hint)
        kinds = {type(bound) for bound in bounds}
        if inner is int or inner is float:
            return not ({Ge, Le} <= kinds or Predicate in kinds)
        if inner in (str, bytes):
            return MaxLen not in kinds
        return MaxLen not in kinds or any(bounds_missing(each) for each in get_args(inner) if each is not ...)
    if (get_origin(hint) is tuple and ... not in get_args(hint)) or get_origin(hint) in (Union, UnionType):
        return any(bounds_missing(each) for each in get_args(hint))
    return not (hint in (bool, NoneType) or get_origin(hint) is Literal or dataclasses.is_dataclass(hint))


@pytest.mark.parametrize("cls", [*RECORDS, presence.PeerStatus], ids=lambda cls: cls.__name__)
def test_every_field_has_a_bound(cls: type[Any]) -> None:
    hints = get_type_hints(cls, include_extras=True)
    assert [field.name for field in dataclasses.fields(cls) if bounds_missing(hints[field.name])] == []


@pytest.mark.parametrize(
    "hint",
    [int, str, Annotated[int, Ge(0)], Annotated[str, Ge(0)], tuple[int, ...], Annotated[tuple[int, ...], MaxLen(3)], int | None,
     tuple[fields.Count, ...], tuple[fields.Count, str]],
    ids=str,
)
def test_a_missing_bound_is_seen(hint: Any) -> None:
    assert bounds_missing(hint)


@pytest.mark.parametrize(
    "beyond",
    [
        samples.Interval(0, -1, 3),
        samples.Interval(0, 0, 2**53 + 1),
        consensus.Vote("x" * 129, b""),
        consensus.Vote("x", bytes(2**11 + 1)),
        rounds.Ping(-2),
        presence.SpeedRequest(1),  # type: ignore[arg-type]
        presence.DialBackRequest((1,) * 17),
        presence.Moved(1, float("nan")),
        refusals.Refusal("other", "x" * 501),
        rounds.Revision("plan", ((2**10,),)),
    ],
    ids=repr,
)
def test_what_is_beyond_a_bound_is_not_read(beyond: Any) -> None:
    with pytest.raises(WireError):
        unpack(type(beyond), pack(beyond))


def test_a_field_at_its_default_leaves_no_trace() -> None:
    """So a record keeps its id when a newer version gives it one more field, until that field is used."""
    assert pack(rounds.PushHeader("p")) == pack(rounds.PushHeader("p", 0)) == msgpack.packb(["p"])
    assert unpack(rounds.PushHeader, msgpack.packb(["p"])) == rounds.PushHeader("p")
    with pytest.raises(WireError, match="canonical"):
        unpack(rounds.PushHeader, msgpack.packb(["p", 0]))


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=EXAMPLES_OF_EACH_RECORD)
@given(data=st.data())
def test_fields_of_a_newer_version_are_ignored_in_extensible_records_only(cls: type[Any], data: st.DataObject) -> None:
    record = data.draw(st.from_type(cls))
    newer = [*(_plain(getattr(record, field.name)) for field in dataclasses.fields(cls)), data.draw(PLAIN)]
    packed = msgpack.packb(newer)
    if issubclass(cls, Extensible):
        assert unpack(cls, packed) == record
    else:
        with pytest.raises(WireError):
            unpack(cls, packed)


def test_no_extensible_record_is_inside_another_one() -> None:
    inside = {each for cls in RECORDS for hint in get_type_hints(cls).values() for each in records_in(hint)}
    assert not [cls for cls in inside if issubclass(cls, Extensible)]


def records_in(hint: Any) -> set[type[Any]]:
    found = {hint} if isinstance(hint, type) and dataclasses.is_dataclass(hint) else set()
    return found.union(*map(records_in, get_args(hint)))


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=EXAMPLES_OF_EACH_RECORD)
@given(data=st.data())
def test_every_record_round_trips(cls: type[Any], data: st.DataObject) -> None:
    record = data.draw(st.from_type(cls))
    packed = pack(record)
    assert unpack(cls, packed) == record
    assert pack(unpack(cls, packed)) == packed
    assert record_id(unpack(cls, packed)) == record_id(record)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_a_wire_error_and_nothing_else(cls: type[Any], garbage: bytes) -> None:
    read_or_wire_error(cls, garbage)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=EXAMPLES_OF_EACH_RECORD)
@given(data=st.data())
def test_fields_of_wrong_types_are_a_wire_error_and_nothing_else(cls: type[Any], data: st.DataObject) -> None:
    record = data.draw(st.from_type(cls))
    values = [_plain(getattr(record, field.name)) for field in dataclasses.fields(cls)]
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = data.draw(PLAIN)
    read_or_wire_error(cls, msgpack.packb(values))


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=EXAMPLES_OF_EACH_RECORD)
@given(st.data(), st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3), st.floats(0, 1))
def test_a_mutated_record_is_another_one_or_a_wire_error(
    cls: type[Any], data: st.DataObject, flips: list[tuple[float, int]], end: float
) -> None:
    """Bytes of a record that are changed, and followed by some of its own again."""
    packed = pack(data.draw(st.from_type(cls)))
    changed = bytearray(packed)
    for place, bits in flips:
        changed[min(len(changed) - 1, int(place * len(changed)))] ^= bits
    read_or_wire_error(cls, bytes(changed))
    read_or_wire_error(cls, packed + bytes(changed[int(end * len(changed)) :]))


def read_or_wire_error(cls: type[Any], data: bytes) -> None:
    """What is read has all the bytes, but for fields that a newer version may have added."""
    try:
        record = unpack(cls, data)
    except WireError:
        return
    again = pack(record)
    if again[1:] != data[1:] and issubclass(cls, Extensible):
        assert data[1 : len(again)] == again[1:]
        assert data[0] > again[0]
    else:
        assert again == data


def test_a_field_that_a_changed_header_adds_is_ignored() -> None:
    read_or_wire_error(content.CampaignRequest, bytes([0x95]) + pack(content.CampaignRequest(78))[1:] + b"\x00\x01\xe9\xe0")


HEAD_BYTES = pack(presence.Contact("c", 1, "trainer", 3, "h", ("/ip4/1.2.3.4",)))


@pytest.mark.parametrize("length", range(len(HEAD_BYTES)))
def test_a_truncated_record_is_a_wire_error(length: int) -> None:
    with pytest.raises(WireError):
        unpack(presence.Contact, HEAD_BYTES[:length])


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
        unpack(presence.Contact, data)


def test_one_meaning_has_one_form_of_bytes() -> None:
    """A longer encoding of the same number would be the same record under another id."""
    interval = Interval(0, 1, 2)
    assert pack(interval) == b"\x93\x00\x01\x02"
    with pytest.raises(WireError, match="canonical"):
        unpack(Interval, b"\x93\x00\xcc\x01\x02")


def test_shared_records_are_read_by_type_and_bytes() -> None:
    share_records(4)
    try:
        interval = unpack(Interval, b"\x93\x00\x01\x02")
        assert unpack(Interval, memoryview(b"\x93\x00\x01\x02")) is interval
        assert unpack(Interval, b"\x93\x00\x01\x03") == Interval(0, 1, 3)
        assert unpack(Interval, b"\x93\x00\x01\x02") == interval
        for _ in range(2):
            with pytest.raises(WireError):
                unpack(presence.Contact, b"\x93\x00\x01\x02")
    finally:
        share_records(0)


def test_what_a_shared_record_is_packed_as_does_not_depend_on_what_is_kept() -> None:
    large = Signed("peer", bytes(2 * SHARED_BYTES), b"signature")
    for record in (large, _Holder(3, large, None), _Holder(3, large, large)):
        plain = pack(record)
        share_records(4)
        try:
            record_id(large)
            assert pack(record) == plain
            assert pack(large) is pack(unpack(Signed, bytes(bytearray(pack(large)))))
        finally:
            share_records(0)


def test_large_records_that_somebody_holds_are_shared_alone_and_in_lists_of_them() -> None:
    commits = (dataclasses.replace(COMMIT, round=number) for number in range(2 * SHARED_LARGE))
    decided = [CertifiedCommit(commit, Ballot(1, "A"), ()) for commit in commits]
    packed = [pack(each) for each in decided]
    share_records(1)
    held = [unpack(CertifiedCommit, each) for each in packed]
    assert len(packed[0]) > SHARED_BYTES
    packed = list(map(pack, decided))
    assert all(pack(dataclasses.replace(each)) is data for each, data in zip(decided, packed, strict=True))
    for each, data in zip(held, packed, strict=True):
        assert unpack(CertifiedCommit, bytes(bytearray(data))) is each
    page = pack_list(packed[3:9])
    assert all(one is other for one, other in zip(unpack(Decide, page).decided, held[3:9], strict=True))
    assert unpack(Decide, page) == Decide(tuple(decided[3:9]))
    for wrong in (page + b"\x00", page[:-1], b"\x92" + page[1:], pack(decided[0])):
        with pytest.raises(WireError):
            unpack(Decide, wrong)
    share_records(0)


def test_the_first_field_of_a_record_is_found_with_its_id() -> None:
    first, name = unpack_first(Commit, pack(CertifiedCommit(COMMIT, Ballot(1, "A"), ())))
    assert name == COMMIT.id
    assert [first.round, first.parent, tuple(first.members)] == [COMMIT.round, COMMIT.parent, COMMIT.members]
    for wrong in (b"", b"\x01", pack(Interval(0, 1, 2)), pack_list([pack(Interval(0, 1, 2))])):
        with pytest.raises(WireError):
            unpack_first(Commit, wrong)


COMMIT = Commit(
    campaign="c" * 64, term=0, round=1, parent="p" * 64, plan="", roots=(), dropped=(), base_digest="", step=0, tokens=0,
    members=tuple(f"member-{i:03}" for i in range(100)), owners=(), cursor=Cursor(), helpers=(), electorate=(), incarnations=(),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Holder:
    number: int
    first: Signed
    second: Signed | None = None

"""Records as bytes: msgpack of a dataclass's fields in order, checked against their types and bounds when read.

The same record always gives the same bytes and no others are read, so a record's id is the sha256 of its bytes. Nothing
executable is ever decoded.

How a record may grow: a new field stands at the end and has a default. Trailing fields that equal their defaults are left out
of the bytes, so a record that does not use the new field has the same bytes and id for old and new peers. One that does
use it is a WireError for an older peer, which could neither hash, check nor forward it. Extensible records are the exception:
an older peer ignores the fields that it does not know. They are hashed, signed or stored only as the bytes that came.
"""

from __future__ import annotations

import hashlib
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache, partial
from itertools import cycle, islice
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import msgpack
from annotated_types import MaxLen

if TYPE_CHECKING:  # imported with the first record that is read: not every command reads one
    from pydantic import TypeAdapter

Record = TypeVar("Record")
Buffer = bytes | bytearray | memoryview
_Reader = Callable[["_Source"], Any]

NONE = 0xC0
"""msgpack's byte for None."""

MAX_LISTS, MAX_VALUES = 2**17, 2**21
"""Lists, nested records included, and values in one record. A list of four bytes takes 450 as a record of three numbers, and
7 us to read: this bounds both to 60 MB and a second. Twice MAX_SERVED lists and twice MAX_PARTS values fit (`fields.py`)."""

SHARED_BYTES, SHARED_LARGE = 2**10, 64
"""Keep fewer of the records that are larger than this (`share_records`): proposals and commits of the last rounds."""
LOGGED_BYTES, SHARED_LOGGED = 2**16, 1024
"""Keep more of what records up to this size are packed as: logs hold it, of all rounds."""


class WireError(ValueError):
    """The bytes are not a record of the expected type."""


class Extensible:
    """Base of records that may end with fields of a newer version. Never nested in other records."""


class Listing:
    """Base of records whose only field is a list of large records, which processes with several peers share one by one."""


def pack(record: Any) -> bytes:
    """Return the record's canonical bytes."""
    known = _packed(record)
    if known is not None:
        return known
    packed: bytes = msgpack.packb(_plain(record), use_bin_type=True)
    return packed if _shared is None or len(packed) <= SHARED_BYTES else _shared(packed)


def pack_list(packed: Sequence[bytes]) -> bytes:
    """Return the canonical bytes of a record whose only field is a list of these packed records."""
    packer = msgpack.Packer()
    return b"".join((packer.pack_array_header(1), packer.pack_array_header(len(packed)), *packed))


def unpack_first(cls: Any, data: Buffer) -> tuple[Any, str]:
    """Return a record of type `cls` that is the first field of a packed one, and its id. Raises WireError.

    Quickly, for what was checked before it was stored: no type is checked, and what is nested stays lists.
    """
    try:
        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=max(1, len(data)))
        unpacker.feed(data)
        unpacker.read_array_header()
        start = unpacker.tell()
        record = cls(*unpacker.unpack())
        return record, hashlib.sha256(data[start : unpacker.tell()]).hexdigest()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not a {cls.__name__}: {error}") from None


def unpack(cls: type[Record], data: Buffer) -> Record:
    """Read a record of type `cls`. Raises WireError for non-canonical bytes and for values out of bounds.

    The bytes are read along the fields' types: a list is read once its length is known to be within its field's bound, and
    nothing nested deeper than the type. So a record takes memory in proportion to its bytes, whatever these claim, and no more
    than MAX_LISTS and MAX_VALUES do.
    """
    record: Record = _read(cls, data)
    return record


def share_records(count: int) -> None:
    """Keep the last `count` small records that were read, and the last large ones, for a process whose peers read the same.

    0: keep none, as at first.
    Records are immutable, and the same bytes of the same type always give the same record. A large one is also found while
    anybody holds it, alone or in a Listing. What a large one is packed as is kept, too, also of those that were made here and
    have an id, and equal bytes are one object. A record with one of them in a field takes its bytes from there.
    """
    global _read, _listed, _packed, _remember, _shared
    if not count:
        _read, _listed, _packed, _remember, _shared = _read_record, _list, _unknown, _forget, None
        return
    small, large = lru_cache(count)(_read_record), lru_cache(SHARED_LARGE)(_read_record)
    held: WeakValueDictionary[tuple[Any, bytes], Any] = WeakValueDictionary()
    listed: OrderedDict[int, tuple[Any, list[Any], bytes]] = OrderedDict()

    def read(cls: Any, data: Buffer) -> Any:
        if len(data) <= SHARED_BYTES:
            return small(cls, bytes(data))
        if issubclass(cls, Listing):
            return cls(tuple(read(_item_of(cls), each) for each in _items(data)))
        data = same(bytes(data))
        record = held.get((cls, data))
        if record is None:
            record = held[cls, data] = large(cls, data)
        if not issubclass(cls, Extensible):  # it may not be packed as it came
            remember(record, data)
        return record

    def list_or_recall(record: Any) -> list[Any]:
        found = listed.get(id(record))
        return _list(record) if found is None else found[1]

    def packed_or_none(record: Any) -> bytes | None:
        found = listed.get(id(record))
        if found is not None or not is_dataclass(record):
            return None if found is None else found[2]
        fields_of = [getattr(record, name) for name in _field_names(typing.cast(Any, type(record)))]
        if not any(id(each) in listed for each in fields_of):
            return None
        listing = _list(record)
        pieces: list[bytes] = [msgpack.Packer().pack_array_header(len(listing))]
        for plain, each in zip(listing, fields_of, strict=False):
            known = listed.get(id(each))
            pieces.append(msgpack.packb(plain, use_bin_type=True) if known is None else known[2])
        return b"".join(pieces)

    def remember(record: Any, packed: Buffer) -> None:
        if len(packed) > SHARED_BYTES and id(record) not in listed:
            listed[id(record)] = record, _list(record), same(bytes(packed))
            while len(listed) > SHARED_LARGE:
                listed.popitem(last=False)

    logged, others = lru_cache(SHARED_LOGGED)(_same), lru_cache(SHARED_LARGE)(_same)

    def same(packed: bytes) -> bytes:
        return logged(packed) if len(packed) <= LOGGED_BYTES else others(packed)

    _read, _listed, _packed, _remember, _shared = read, list_or_recall, packed_or_none, remember, same


def _read_record(cls: Any, data: Buffer) -> Any:
    kind: Any = cls
    try:
        source = _Source(data)
        given = source.array()
        known = min(given, len(_field_readers(kind))) if issubclass(kind, Extensible) else given
        record = _adapter(kind).validate_python(_read_fields(kind, source, known))
        if known < given:
            canonical = msgpack.Packer().pack_array_header(given) + b"".join(map(msgpack.packb, _all_fields(record)))
            data = data[: source.place()]
            source.skip(given - known)
        else:
            canonical = pack(record)
        if canonical != data or not source.is_read():
            raise WireError("not its canonical bytes")
        return record
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not a {cls.__name__}: {_problem(error)}") from None


def _items(data: Buffer) -> Iterator[bytes]:
    """Yield the packed records of a packed Listing. Raises WireError."""
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
        unpacker.feed(data)
        fields, items, end = unpacker.read_array_header(), unpacker.read_array_header(), unpacker.tell()
        for _ in range(items):
            start = end
            unpacker.skip()
            end = unpacker.tell()
            yield bytes(data[start:end])
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not a list of records: {error}") from None
    if fields != 1 or end != len(data):
        raise WireError("not its canonical bytes")


@cache
def _item_of(cls: Any) -> Any:
    """Return the type of a Listing's records."""
    (hint,) = typing.get_type_hints(cls).values()
    return typing.get_args(hint)[0]


def _problem(error: Exception) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


_read: Callable[[Any, Buffer], Any] = _read_record


def record_id(record: Any) -> str:
    """Return the hex sha256 of the record's canonical bytes."""
    packed = pack(record)
    _remember(record, packed)
    return hashlib.sha256(packed).hexdigest()


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in (str, int, bytes, float, bool):
        return value
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    return _listed(value) if is_dataclass(value) else value


def _list(record: Any) -> list[Any]:
    """Return the record's fields without trailing defaults."""
    values, kind = _all_fields(record), typing.cast(Any, type(record))
    for default in _trailing_defaults(kind):
        if values[-1] != default:
            break
        values.pop()
    return values


_listed: Callable[[Any], list[Any]] = _list


def _forget(record: Any, packed: Buffer) -> None:
    """Keep nothing."""


def _unknown(record: Any) -> bytes | None:
    return None


def _same(packed: bytes) -> bytes:
    return packed


_packed: Callable[[Any], bytes | None] = _unknown
_remember: Callable[[Any, Buffer], None] = _forget
_shared: Callable[[bytes], bytes] | None = None


def _all_fields(record: Any) -> list[Any]:
    kind: Any = type(record)
    return [_plain(getattr(record, name)) for name in _field_names(kind)]


class _Source:
    """Packed values, read one by one."""

    def __init__(self, data: Buffer):
        self._data, self._size = data, len(data)
        self._unpacker = msgpack.Unpacker(
            raw=False, strict_map_key=False, read_size=max(1, self._size), max_buffer_size=max(1, self._size),
            max_str_len=self._size, max_bin_len=self._size, max_array_len=0, max_map_len=0, max_ext_len=0,
        )
        self._unpacker.feed(data)
        self._lists, self._values = MAX_LISTS, MAX_VALUES
        """That may still be read."""
        self.scalar: Callable[[], Any] = self._unpacker.unpack
        """Read a value that is no list, map or extension."""
        self.place: Callable[[], int] = self._unpacker.tell
        """Return the number of bytes that are read."""

    def array(self) -> int:
        """Read the length of a list; each of its items takes a byte at least."""
        length: int = self._unpacker.read_array_header()
        if length > self._size - self.place():
            raise WireError("a list that ends early")
        self._lists, self._values = self._lists - 1, self._values - length
        if self._lists < 0 or self._values < 0:
            raise WireError(f"more than {MAX_LISTS} lists, or {MAX_VALUES} values")
        return length

    def is_none(self) -> bool:
        """Return whether None is next."""
        return self.place() < self._size and self._data[self.place()] == NONE

    def is_read(self) -> bool:
        """Return whether nothing is left."""
        return self.place() == self._size

    def skip(self, values: int) -> None:
        """Read values of any kind without keeping them."""
        for _ in range(values):
            self._unpacker.skip()


def _reader(hint: Any, longest: int | None = None) -> _Reader:
    """Return what reads a value of this type: nested records as mappings by field, for the type check."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _reader(options[0], next((bound.max_length for bound in options[1:] if isinstance(bound, MaxLen)), None))
    if origin in (typing.Union, UnionType):
        inner = _reader(next(option for option in options if option is not NoneType))
        return lambda source: source.scalar() if source.is_none() else inner(source)
    if is_dataclass(hint):
        return lambda source: _read_fields(hint, source, source.array())
    if origin is tuple:
        readers = tuple(_reader(option) for option in options if option is not Ellipsis)
        return partial(_read_list, readers, longest if Ellipsis in options else len(readers))
    return lambda source: source.scalar()


def _read_list(readers: Sequence[_Reader], longest: int | None, source: _Source) -> list[Any]:
    length = source.array()
    if longest is not None and length > longest:
        raise WireError(f"a list of {length}, at most {longest} are allowed")
    return [read(source) for read in islice(cycle(readers), length)]


def _read_fields(cls: Any, source: _Source, given: int) -> dict[str, Any]:
    readers = _field_readers(cls)
    if not _required(cls) <= given <= len(readers):
        raise WireError(f"{given} fields instead of {len(readers)}")
    return {name: read(source) for name, read in islice(readers.items(), given)}


@cache
def _field_readers(cls: Any) -> dict[str, _Reader]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: _reader(hints[name]) for name in _field_names(cls)}


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _required(cls: Any) -> int:
    """Return the number of fields without a default; they come first."""
    return sum(field.default is MISSING for field in fields(cls))


@cache
def _trailing_defaults(cls: Any) -> tuple[Any, ...]:
    """Return the packed defaults, from the last field to the first that has one."""
    return tuple(_plain(field.default) for field in reversed(fields(cls)) if field.default is not MISSING)


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(cls, config=None if is_dataclass(cls) else ConfigDict())

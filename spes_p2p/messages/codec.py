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
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError

Record = TypeVar("Record")


class WireError(ValueError):
    """The bytes are not a record of the expected type."""


class Extensible:
    """Base of records that may end with fields of a newer version. Never nested in other records."""


def pack(record: Any) -> bytes:
    """Return the record's canonical bytes."""
    packed: bytes = msgpack.packb(_plain(record), use_bin_type=True)
    return packed


def unpack(cls: type[Record], data: bytes | bytearray | memoryview) -> Record:
    """Read a record of type `cls`. Raises WireError for non-canonical bytes and for values out of bounds."""
    kind: Any = cls
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=False)
        unknown = values[len(_field_names(kind)) :] if issubclass(kind, Extensible) and isinstance(values, list) else []
        fields_by_name = _named(kind, values[: -len(unknown)] if unknown else values)
        record: Record = _adapter(kind).validate_python(fields_by_name)
        canonical = msgpack.packb([*_all_fields(record), *unknown]) if unknown else pack(record)
        if canonical != data:
            raise WireError("not its canonical bytes")
        return record
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise WireError(f"not a {cls.__name__}: {where}: {problem['msg']}") from None
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not a {cls.__name__}: {error}") from None


def record_id(record: Any) -> str:
    """Return the hex sha256 of the record's canonical bytes."""
    return hashlib.sha256(pack(record)).hexdigest()


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in (str, int, bytes, float, bool):
        return value
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    if is_dataclass(value):
        values = _all_fields(value)
        for default in _trailing_defaults(kind):
            if values[-1] != default:
                break
            values.pop()
        return values
    return value


def _all_fields(record: Any) -> list[Any]:
    kind: Any = type(record)
    return [_plain(getattr(record, name)) for name in _field_names(kind)]


def _named(cls: Any, value: Any) -> Any:
    if not isinstance(value, list):
        raise WireError("a record is a list of fields")
    names = _field_names(cls)
    if not _required(cls) <= len(value) <= len(names):
        raise WireError(f"{len(value)} fields instead of {len(names)}")
    return {name: _nest(cls, name, item) for name, item in zip(names, value, strict=False)}


def _nest(cls: Any, name: str, item: Any) -> Any:
    """Name the fields of nested records, which arrive as lists, for the type check."""
    kind, inner = _nested(cls).get(name, ("", None))
    if item is None or inner is None:
        return item
    if kind == "one":
        return _named(inner, item)
    return [_named(inner, entry) for entry in item]


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
def _nested(cls: Any) -> dict[str, tuple[str, Any]]:
    """Return the fields that hold a record ("one") or a tuple of records ("many")."""
    found: dict[str, tuple[str, Any]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        options = [hint, *typing.get_args(hint)]
        record = next((option for option in options if is_dataclass(option)), None)
        if record is not None:
            many = typing.get_origin(hint) is tuple
            found[name] = ("many" if many else "one", record)
    return found


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls, config=None if is_dataclass(cls) else ConfigDict())

"""Records as bytes: msgpack of a dataclass's fields in order, checked against their types when read.

The same record always gives the same bytes and no others are read, so a record's id is the sha256 of its bytes. Nothing
executable is ever decoded.
"""

from __future__ import annotations

import hashlib
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError

Record = TypeVar("Record")


class WireError(ValueError):
    """Bytes that are no record of the expected type."""


def pack(record: Any) -> bytes:
    """The record's canonical bytes."""
    packed: bytes = msgpack.packb(_plain(record), use_bin_type=True)
    return packed


def unpack(cls: type[Record], data: bytes | memoryview) -> Record:
    """Read a record of type `cls`. Raises WireError when the bytes are anything else than `pack` makes of one."""
    kind: Any = cls
    try:
        fields_by_name = _named(kind, msgpack.unpackb(data, raw=False, strict_map_key=False))
        record: Record = _adapter(kind).validate_python(fields_by_name)
        if pack(record) != data:
            raise WireError("not its canonical bytes")
        return record
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise WireError(f"not a {cls.__name__}: {where}: {problem['msg']}") from None
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not a {cls.__name__}: {error}") from None


def record_id(record: Any) -> str:
    """Hex sha256 of the record's canonical bytes."""
    return hashlib.sha256(pack(record)).hexdigest()


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in (str, int, bytes, float, bool):
        return value
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return [_plain(getattr(value, name)) for name in _field_names(kind)]
    return value


def _named(cls: Any, value: Any) -> Any:
    if not isinstance(value, list):
        raise WireError("a record is a list of fields")
    names = _field_names(cls)
    if len(value) != len(names):
        raise WireError(f"{len(value)} fields instead of {len(names)}")
    return dict(zip(names, (_nest(cls, name, item) for name, item in zip(names, value, strict=True)), strict=True))


def _nest(cls: Any, name: str, item: Any) -> Any:
    """Nested records arrive as lists too: name their fields, so that the type check sees them."""
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
def _nested(cls: Any) -> dict[str, tuple[str, Any]]:
    """Fields of `cls` that hold a record ("one") or a tuple of records ("many")."""
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

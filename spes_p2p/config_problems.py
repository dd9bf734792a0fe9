"""Says what is wrong with a configuration, in one line: the field, its value, what would be right."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

Location = tuple[str | int, ...]

_RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "greater_than": "must be greater than {gt:.10g}",
    "greater_than_equal": "must be at least {ge:.10g}",
    "less_than": "must be less than {lt:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
    "literal_error": "must be one of {expected}",
}
"""Pydantic's error types that our fields can have, in our words. `{}` fields come from the error's context."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (path of field names) and one line about it."""

    location: Location
    message: str


def broken_rule(rule: str, field: str = "", value: object = None) -> PydanticCustomError:
    """What a validator raises when `rule` (what would be right) does not hold.

    A validator of a whole section names the field, relative to the section, and its value; a field's own validator need not.
    """
    return PydanticCustomError("broken_rule", "{field} = {value}: {rule}", {"rule": rule, "field": field, "value": value})


def dotted(location: Location) -> str:
    """A field's name in a campaign file: `training.sync_steps`."""
    return ".".join(str(part) for part in location)


def first_problem(error: ValidationError, model: type[BaseModel], name: Callable[[Location], str] = dotted) -> Problem:
    """The problem to fix first: an unknown field before all else, since a misspelt field is also a missing one.

    `name` says how the person who reads the message knows a field.
    """
    problems = error.errors()
    unknown = [problem for problem in problems if problem["type"] in ("extra_forbidden", "invalid_key")]
    first = (unknown or problems)[0]
    described = _describe(first, model, name)
    alternatives = [other for other in problems if other is not first and _place(other) == _place(first)]
    messages = (_describe(other, model, name).message for other in alternatives)
    rules = [message.rpartition(": must be ")[2].removeprefix("one of ") for message in messages]
    return Problem(described.location, " or ".join([described.message, *rules]))


def _place(problem: ErrorDetails) -> Location:
    """The field; for one of several types pydantic adds which of them was tried (`constrained-int`, `literal['auto']`)."""
    return tuple(part for part in problem["loc"] if not str(part).startswith(("constrained-", "literal[")))


def _describe(problem: ErrorDetails, model: type[BaseModel], name: Callable[[Location], str]) -> Problem:
    location, kind, value = _place(problem), problem["type"], problem["input"]
    context = problem.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return Problem(location, f"unknown field '{name(location)}'; {_advice(location, model)}")
    if kind == "missing":
        what = "section" if _is_section(_field_type(model, location)) else "field"
        return Problem(location[:-1], f"{what} '{name(location)}' is missing; add it")
    if kind == "model_type":
        state = "is empty" if value is None else f"is {_shown(value)}"
        return Problem(location, f"section '{name(location)}' {state}; indent its fields below it")
    if kind == "broken_rule":
        if context["field"]:
            path = (int(part) if part.isdigit() else part for part in context["field"].split("."))
            location, value = (*location, *path), context["value"]
        rule = context["rule"]
    elif kind in _RULES:
        rule = _RULES[kind].format(**context)
    else:
        rule = problem["msg"]
    return Problem(location, " ".join(f"{name(location)} = {_shown(value)}: {rule}".split()))


def _advice(location: Location, model: type[BaseModel]) -> str:
    """What to write in place of an unknown field."""
    *path, name = map(str, location)
    section = _field_type(model, tuple(path))
    known = list(section.model_fields) if _is_section(section) else []
    elsewhere = [home for home, subsection in _sections(model) if name in subsection.model_fields and home != ".".join(path)]
    if elsewhere:
        return f"it belongs in section '{elsewhere[0]}'" if elsewhere[0] else "it belongs at the top, in no section"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(sorted(known))}"


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if _is_section(kind):
            yield from _sections(kind, f"{prefix}.{name}" if prefix else name)


def _field_type(model: type[BaseModel], location: Location) -> Any:
    """The declared type of the field, or of the item of a list, at `location`; the model itself for ()."""
    kind: Any = model
    for name in location:
        inner = typing.get_args(kind)
        if typing.get_origin(kind) in (tuple, dict):
            kind = inner[0] if typing.get_origin(kind) is tuple else inner[1]
        else:
            kind = kind.model_fields[name].annotation
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _shown(value: object, longest: int = 60) -> str:
    if value is None:
        return "(nothing)"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= longest else f"{text[:longest - 3]}..."

"""Validate settings; report a problem in one line: the field, its value, and what would be valid."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from spes_p2p.errors import UserError

M = TypeVar("M", bound=BaseModel)
Location = tuple[str | int, ...]

_RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "dict_type": "must be the content of a config.json, or its path in a campaign file",
    "tuple_type": "must be a list",
    "model_type": "must be a section; indent its fields below it",
    "greater_than_equal": "must be at least {ge:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
}
"""Replaces pydantic's messages for these error types, which are written for programmers."""
_UNKNOWN = ("extra_forbidden", "invalid_key")


def broken_rule(rule: str, field: str = "", value: object = None) -> PydanticCustomError:
    """Return the error that a validator raises when `rule` ("must be ...") does not hold.

    A validator of a section names the field, relative to the section, and its value; a field's own validator need not.
    """
    return PydanticCustomError("broken_rule", "{field} = {value}: {rule}", {"rule": rule, "field": field, "value": value})


def dotted(location: Location) -> str:
    """Return a field's name as users write it: `training.sync_steps`."""
    return ".".join(map(str, location))


def validated(model: type[M], values: Mapping[str, Any], where: Callable[[Location], str]) -> M:
    """Return the validated settings, or raise UserError for one problem.

    Unknown fields are reported first: a misspelt field is also a missing one. `where` maps a field to the place that sets it
    ("" if there is none); an option, --NAME, is shown in place of the field.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    problem = next((each for each in problems if each["type"] in _UNKNOWN), problems[0])
    location, message = _describe(problem, model, lambda location: _option(where(location)) or dotted(location))
    place = where(location)
    raise UserError(message if not place or _option(place) else f"{place}: {message}")


def _option(place: str) -> str:
    return place if place.startswith("--") else ""


def _describe(problem: ErrorDetails, model: type[BaseModel], name: Callable[[Location], str]) -> tuple[Location, str]:
    kind, value = problem["type"], problem["input"]
    location = tuple(part for part in problem["loc"] if not str(part).startswith("<"))  # tags of a section's forms
    if kind in _UNKNOWN:
        return location, f"unknown field '{name(location)}'; {_advice(location, _sections(model))}"
    if kind == "missing":
        return location, f"{name(location)} is missing; add it"
    known = _RULES.get(kind)
    rule = problem["msg"].replace("Input should", "must") if known is None else known.format(**problem.get("ctx", {}))
    if kind == "broken_rule":
        broken = problem["ctx"]
        rule = broken["rule"]
        if broken["field"]:
            location, value = (*location, *broken["field"].split(".")), broken["value"]
    named = name(location)
    return location, f"{named}{' ' if _option(named) else ' = '}{_shown(value)}: {rule}"


def _advice(location: Location, sections: Mapping[Location, type[BaseModel]]) -> str:
    """Suggest a fix for an unknown field."""
    home, name = tuple(part for part in location[:-1] if isinstance(part, str)), str(location[-1])
    for section, fields in sections.items():
        if name in fields.model_fields and section != home:
            return f"it belongs in section '{dotted(section)}'" if section else "it belongs at the top level"
    known = sorted(sections[home].model_fields) if home in sections else []
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"remove it; valid here: {', '.join(known)}"


def _sections(model: type[BaseModel], home: Location = ()) -> dict[Location, type[BaseModel]]:
    """Map paths of field names to the model and its nested sections, those in lists included."""
    found = {home: model}
    for name, field in model.model_fields.items():
        for kind in reversed(list(_plain_types(field.annotation))):  # of two forms of a section, the first counts
            if issubclass(kind, BaseModel):
                found |= _sections(kind, (*home, name))
    return found


def _plain_types(annotation: object) -> Iterator[type]:
    """Yield the classes in an annotation, in order."""
    if isinstance(annotation, type):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _plain_types(inner)


def _shown(value: object, longest: int = 60) -> str:
    if value is None:
        return "(nothing)"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= longest else f"{text[:longest - 3]}..."

"""Read YAML files that users write: repeated fields are errors, every line is known, 3e-4 is a number, a date is text."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.errors import UserError


@dataclass(frozen=True)
class YamlFile:
    """A parsed file: its top-level mapping, and the line of each field and list item by its path."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def where(self, location: tuple[str | int, ...]) -> str:
        """Return `path, line N` for the field at `location`, or for its closest ancestor in the file."""
        at = tuple(map(str, location))
        while at and at not in self.lines:
            at = at[:-1]
        return f"{self.path}, line {self.lines[at]}" if at else f"{self.path}"


def read_yaml_mapping(path: Path, what: str) -> YamlFile:
    """Parse a file that holds a mapping. `what` names the kind of file in errors. Raises UserError with path and line."""
    try:
        text = path.read_text(encoding="utf-8")
        values, lines = yaml.load(text, _Loader), _lines(yaml.compose(text, _Loader))
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what} ({error.strerror}); give a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; give a {what} in YAML") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or getattr(error, "reason", "")
        if not isinstance(error, yaml.constructor.ConstructorError):
            problem = f"not valid YAML ({problem}); check indentation and colons"
        raise UserError(f"{path}{f', line {mark.line + 1}' if mark else ''}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: has a value that cannot be read ({error}); correct it") from None
    if not isinstance(values, dict):
        found = "empty" if values is None else "a list" if isinstance(values, list) else "a single value"
        raise UserError(f"{path}: a {what} is a mapping of fields to values, but this file is {found}")
    return YamlFile(path, values, lines)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but repeated keys are errors, 3e-4 is a number, and a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                problem = f"field '{key.value}' is given twice; keep one"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: str(node.value))


def _lines(node: yaml.Node | None, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    found: dict[tuple[str, ...], int] = {}
    for name, start, child in children:
        found |= {(*at, name): start.start_mark.line + 1, **_lines(child, (*at, name))}
    return found

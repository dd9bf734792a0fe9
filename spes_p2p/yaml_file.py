"""Reads a YAML file that a person wrote: repeated fields are errors, every value's line is known, 3e-4 is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.errors import UserError


@dataclass(frozen=True)
class YamlFile:
    """A parsed file: its top-level mapping, and the syntax tree that knows the lines."""

    path: Path
    values: dict[str, Any]
    root: yaml.Node

    def where(self, location: Sequence[str | int]) -> str:
        """`path, line N` of the field at `location`, or of its closest ancestor in the file."""
        line = None
        node = self.root
        for step in location:
            found = _child(node, step)
            if found is None:
                break
            line, node = found
        return f"{self.path}, line {line}" if line else f"{self.path}"


def read_yaml_mapping(path: Path, what: str) -> YamlFile:
    """Parse the file, which must hold a mapping. Raises UserError with the path, the line and `what` the file should be."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what} ({error.strerror}); name a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; name a {what} in YAML") from None
    try:
        root, values = _parse(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_error_line(error)}: {_error_text(error)}") from None
    if root is None or not isinstance(values, dict):
        found = "it is empty" if values is None else f"it holds {_kind(values)}"
        raise UserError(f"{path}: a {what} is a mapping of fields to values, but {found}")
    return YamlFile(path, values, root)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without two of its traps: the last of two equal keys winning, and 3e-4 being text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"field '{key.value}' is given twice; keep one", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _child(node: yaml.Node, step: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    return None


def _error_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark else ""


def _error_text(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    if "given twice" in problem:
        return str(problem)
    return f"not valid YAML ({problem}); check the indentation and the colons there"


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "a single value"

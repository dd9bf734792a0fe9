"""The base class of all settings, and the rule check that its validators share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from spes_p2p.config.problems import broken_rule


class Section(BaseModel):
    """A group of settings. Unknown fields are errors; values are immutable after loading.

    Validators are built when first used, those of a section as a part of the whole: no command uses all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def require(condition: bool, field: str, value: object, rule: str) -> None:
    """Raise the error of a validator unless the condition holds; `field` is relative to the section."""
    if not condition:
        raise broken_rule(rule, field, value)

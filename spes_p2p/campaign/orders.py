"""What the owner of a campaign can order: from the words to a control record, as pure rules of what holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.control import is_paused, number_of
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import CampaignState, Change, Control
from spes_p2p.rounds.schedule import changed


@dataclass(frozen=True)
class Standing:
    """What holds in a campaign before an order."""

    campaign: str
    """Its hash."""
    config: CampaignConfig
    newest: Control | None
    round: int
    """The newest that any peer knows."""
    archived: tuple[int, ...]
    """Rounds whose bases some peer keeps, ascending."""


MakeControl = Callable[[Standing], Control]
"""From what holds to the record that shall hold, unsigned. Raises UserError when the order makes no sense."""


def parse_order(words: Sequence[str]) -> MakeControl:
    """What a person wrote. Raises UserError."""
    plain = {"pause": pause, "resume": resume, "stop": stop}
    name, *rest = words
    if name == "schedule":
        return _parse_schedule(rest)
    if name == "rollback":
        return _parse_rollback(rest)
    if name not in plain:
        raise UserError(f"control: unknown order {name!r}; give one of {', '.join(plain)}, rollback, schedule")
    if rest:
        raise UserError(f"control {name}: takes nothing more, not {' '.join(rest)!r}")
    return plain[name]


def _parse_rollback(words: Sequence[str]) -> MakeControl:
    if len(words) != 1 or not words[0].isdecimal():
        raise UserError("control rollback: give the round to go back to: rollback 40")
    return partial(rollback, int(words[0]))


def _parse_schedule(words: Sequence[str]) -> MakeControl:
    if len(words) < 2 or not words[0].isdecimal():
        raise UserError("control schedule: give a round and what changes from it on: schedule 40 learning_rate=1e-4")
    fields = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            raise UserError(f"control schedule: {word!r} is not NAME=NUMBER, such as learning_rate=1e-4") from None
    return partial(schedule, Change(int(words[0]), json.dumps(fields, sort_keys=True, separators=(",", ":"))))


def pause(standing: Standing) -> Control:
    """No round is planned after the one under way."""
    if is_paused(standing.newest):
        raise UserError(f"pause: the campaign is paused already (record {number_of(standing.newest)})")
    return _next(standing, "paused")


def resume(standing: Standing) -> Control:
    """Rounds go on after a pause, or in spite of a stop that no round has applied yet."""
    if _state(standing) == "running":
        raise UserError("resume: the campaign is not paused; see spes-p2p status")
    return _next(standing, "running")


def stop(standing: Standing) -> Control:
    """The campaign ends with the round under way, for good."""
    return _next(standing, "stopped")


def schedule(change: Change, standing: Standing) -> Control:
    """Other fields of `training` from a round on."""
    if change.round <= standing.round + 1:
        raise UserError(
            f"schedule {change.round}: the phase that leads to round {standing.round + 1} has begun; give round "
            f"{standing.round + 2} or a later one"
        )
    control = _next(standing, _state(standing))
    changes = tuple(sorted((*control.changes, change), key=lambda change: change.round))
    config = standing.config
    for each in changes:
        config = changed(config, each.training, f"schedule {each.round}")
    return replace(control, changes=changes)


def rollback(round_number: int, standing: Standing) -> Control:
    """Back to the base of an earlier round; what was trained since is given up."""
    possible = [kept for kept in standing.archived if kept < standing.round]
    if round_number not in possible:
        kept = ", ".join(map(str, possible)) or "none"
        raise UserError(f"rollback {round_number}: no peer that answers keeps the base of that round; kept are: {kept}")
    return replace(_next(standing, _state(standing)), rollback=round_number)


def _state(standing: Standing) -> CampaignState:
    return "running" if standing.newest is None else standing.newest.state


def _next(standing: Standing, state: CampaignState) -> Control:
    changes = () if standing.newest is None else standing.newest.changes
    return Control(standing.campaign, number_of(standing.newest) + 1, state, changes, -1, b"")


def describe(control: Control | None) -> str:
    """What a record says, for people: paused, rolled back to round 40, from round 60 on learning_rate 0.0001; or ""."""
    if control is None:
        return ""
    words: list[str] = [] if control.state == "running" else [control.state]
    if control.rollback >= 0:
        words.append(f"rolled back to round {control.rollback}")
    for change in control.changes:
        words.append(f"from round {change.round} on {_words(change.training)}")
    return ", ".join(words)


def _words(training: str) -> str:
    """A change without the signs of JSON; printable, whatever was signed."""
    return re.sub(r"[^\w.:,+-]", "", training).replace(":", " ").replace(",", ", ")

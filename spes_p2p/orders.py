"""The owner of a campaign gives an order (`spes-p2p control`): finds out what holds, signs a record, hands it to everybody."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spes_p2p.config import CampaignConfig
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.session import visiting
from spes_p2p.swarm.control import (
    CONTROL,
    ControlRequest,
    Known,
    changed,
    is_paused,
    is_signed,
    is_stopped,
    number_of,
    owner_of,
    scheduled,
    signed,
)
from spes_p2p.swarm.identity import RSAIdentity
from spes_p2p.swarm.records import CampaignState, Change, Control
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.visit import VISIT_SILENCE_S, Visit


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


@dataclass(frozen=True)
class Given:
    """An order that was given."""

    control: Control
    taken: int
    """Peers that have it now; the others learn it from them."""
    peers: int
    round: int
    """The newest that anybody had committed by then."""


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


async def give_order(addresses: Sequence[str], key: Path, make: MakeControl) -> Given:
    """Sign what `make` says and hand it to every peer of the campaign at these addresses. Raises UserError."""
    owner = _owner_key(key)
    with tempfile.TemporaryDirectory(prefix="spes-control-") as folder:
        async with visiting(addresses, Path(folder) / "identity.key") as visit:
            _require_owner(visit, owner, key)
            known = await _ask_all(visit, None)
            standing = _standing(visit, known, addresses[0])
            control = signed(make(standing), owner)
            answers = await _ask_all(visit, control)
    taken = sum(answer.newest == control for answer in answers)
    if not taken:
        raise UserError(f"{addresses[0]}: nobody took the order; see spes-p2p status, then give it again")
    return Given(control, taken, len(answers), max(standing.round, 0))


def _state(standing: Standing) -> CampaignState:
    return "running" if standing.newest is None else standing.newest.state


def _next(standing: Standing, state: CampaignState) -> Control:
    changes = () if standing.newest is None else standing.newest.changes
    return Control(standing.campaign, number_of(standing.newest) + 1, state, changes, -1, b"")


def _owner_key(path: Path) -> RSAIdentity:
    advice = "give the identity.key of the bootstrap peer that began the campaign"
    if not path.is_file():
        raise UserError(f"--key {path}: no such file; {advice}")
    try:
        return RSAIdentity(path)
    except UserError:
        raise UserError(f"--key {path}: not a peer's key; {advice}") from None


def _require_owner(visit: Visit, key: RSAIdentity, path: Path) -> None:
    owner = owner_of(visit.genesis)
    if key.peer_id != owner:
        name = visit.files.campaign.config.name
        raise UserError(
            f"--key {path}: the key of {key.peer_id}, but campaign {name} takes orders of {owner} only; give the identity.key "
            "of the bootstrap peer that began it"
        )


def _standing(visit: Visit, known: Sequence[Known], address: str) -> Standing:
    """Put together what the peers know. Raises UserError when nobody answers or no order makes sense any more."""
    if not known:
        raise UserError(f"{address}: reached, but no peer of the campaign answers; try again in a moment")
    genesis, identity = visit.genesis, visit.world.identity
    valid = [each.newest for each in known if each.newest is not None and is_signed(each.newest, genesis, identity)]
    newest = max(valid, key=number_of, default=None)
    applied = max(each.applied for each in known)
    if is_stopped(newest) and number_of(newest) <= applied:
        raise UserError("the campaign is stopped, for good; what it learned is exported with spes-p2p export")
    config, round_number = visit.files.campaign.config, max(each.round for each in known)
    if max(each.step for each in known) >= scheduled(config, newest, round_number + 1).training.total_steps:
        raise UserError("the campaign is complete; there is nothing left to order")
    if newest is not None and newest.rollback >= 0 and newest.number > applied:
        raise UserError(f"the rollback to round {newest.rollback} is not done yet; give the order again after the next round")
    archived = sorted({kept for each in known for kept in each.archived})
    return Standing(genesis.campaign, config, newest, round_number, tuple(archived))


async def _ask_all(visit: Visit, control: Control | None) -> list[Known]:
    """What every peer that answers knows, after it got this record."""

    async def ask(peer: str) -> Known | None:
        try:
            request = pack(ControlRequest(control))
            return unpack(Known, await visit.board.ask(peer, CONTROL, request, VISIT_SILENCE_S))
        except (PeerUnreachable, Refused, WireError):
            return None

    answers = await asyncio.gather(*(ask(peer) for peer in await visit.contacts()))
    return [answer for answer in answers if answer is not None]

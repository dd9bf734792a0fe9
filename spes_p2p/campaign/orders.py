"""Orders of a campaign's owner: pure functions from the words of an order to an unsigned control record."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spes_p2p.config.addresses import is_peer_id
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.control import is_paused, number_of
from spes_p2p.consensus.milestone import ROLLBACK_ROUNDS, may_roll_back
from spes_p2p.errors import UserError, version_advice
from spes_p2p.messages.consensus import CampaignState, Change, Control, Pardon, Requirement
from spes_p2p.messages.fields import MAX_BANNED
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.rounds.schedule import changed, scheduled

MAX_DIGITS = 12
"""Of a round in an order."""


@dataclass(frozen=True)
class CampaignView:
    """State of a campaign before an order."""

    campaign: str
    """Campaign hash."""
    owner: str
    """Its peer id."""
    config: CampaignConfig
    newest: Control | None
    round: int
    """The newest committed round that any peer knows."""
    step: int
    """Campaign steps in its base."""
    archived: tuple[int, ...]
    """Rounds whose bases some peer archives, ascending."""
    excluded: tuple[str, ...] = ()
    """Peers that proofs exclude after this round."""
    applied: Control | None = None
    """The record that the last commit carries."""
    trusted: Collection[str] = ()
    """Peers that the last commit names and for whom the owner vouches."""

    @property
    def pending(self) -> Control | None:
        """The newest record, if no commit carries it yet."""
        return self.newest if number_of(self.newest) > number_of(self.applied) else None

    @property
    def is_complete(self) -> bool:
        """Whether the base includes the last step."""
        return self._has_all_steps(self.newest)

    @property
    def has_ended(self) -> bool:
        """Whether no phase is assigned, since the base includes the last step but for an order that no commit carries yet."""
        return self._has_all_steps(self.applied)

    def _has_all_steps(self, control: Control | None) -> bool:
        return self.step >= scheduled(self.config, control, self.round + 1).training.total_steps


MakeControl = Callable[[CampaignView], Control]
"""Returns the unsigned record of an order. Raises UserError if the order does not apply."""


def parse_order(words: Sequence[str]) -> MakeControl:
    """Parse the words of an order. Raises UserError."""
    name, *rest = words
    if name == "schedule" and len(rest) > 1:
        return _parse_schedule(rest)
    return partial(_unless_complete, _parse_other(name, rest))


def _unless_complete(make: MakeControl, view: CampaignView) -> Control:
    if view.is_complete:
        raise UserError(f"the campaign is complete; the only order that it takes adds steps: {_more_steps(view)}")
    return make(view)


def _more_steps(view: CampaignView) -> str:
    return f"schedule {view.round + 1} total_steps=NUMBER, with more than {view.step}"


def _parse_other(name: str, rest: Sequence[str]) -> MakeControl:
    plain = {"pause": pause, "resume": resume, "stop": stop}
    if name == "schedule":
        return _parse_unschedule(rest)
    if name == "require":
        return lift if rest == ["none"] else _parse_require(rest)
    if name == "rollback":
        return _parse_rollback(rest)
    if name in _ON_PEERS:
        return _parse_peer(name, rest)
    if name not in plain:
        others = "audit, ban, pardon, require, rollback, schedule, unaudit, unban"
        raise UserError(f"control: unknown order {name!r}; give one of {', '.join(plain)}, {others}")
    if rest:
        raise UserError(f"control {name}: takes no arguments, not {' '.join(rest)!r}")
    return plain[name]


def _parse_rollback(words: Sequence[str]) -> MakeControl:
    if len(words) != 1 or not _is_number(words[0]):
        raise UserError("control rollback: give the round to return to: rollback 40")
    return partial(rollback, int(words[0]))


_SCHEDULE = ("control schedule: give a round and the settings from that round on: schedule 40 learning_rate=1e-4; or the round "
             "alone, to take back what was ordered from it on")


def _parse_unschedule(words: Sequence[str]) -> MakeControl:
    if not words or not _is_number(words[0]):
        raise UserError(_SCHEDULE)
    return partial(unschedule, int(words[0]))


def _parse_schedule(words: Sequence[str]) -> MakeControl:
    if not _is_number(words[0]):
        raise UserError(_SCHEDULE)
    fields = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        try:
            number = json.loads(value)
            if not name.isidentifier():
                raise ValueError(name)
        except (ValueError, RecursionError):
            raise UserError(f"control schedule: {word[:80]!r} is not NAME=NUMBER, such as learning_rate=1e-4") from None
        if name in fields:
            raise UserError(f"control schedule: {name} is given twice")
        fields[name] = number
    return partial(schedule, Change(int(words[0]), json.dumps(fields, sort_keys=True, separators=(",", ":"))))


def _parse_require(words: Sequence[str]) -> MakeControl:
    if len(words) != 3 or words[1] != "from" or not (_is_number(words[0]) and _is_number(words[2])):
        raise UserError("control require: give a protocol version and the first round that needs it: require 11 from 200; or "
                        "require none")
    return partial(require, Requirement(int(words[0]), int(words[2])))


def _is_number(word: str) -> bool:
    """Return whether this is a round or a version: no message holds a larger one."""
    return word.isdecimal() and len(word) <= MAX_DIGITS


def _parse_peer(name: str, words: Sequence[str]) -> MakeControl:
    if len(words) != 1 or not is_peer_id(words[0]):
        raise UserError(f"control {name}: give the whole id of one peer, as spes-p2p status --json shows it: {name} Qm...")
    return partial(_ON_PEERS[name], words[0])


def pause(view: CampaignView) -> Control:
    """Plan no round after the current one."""
    if is_paused(view.applied) and is_paused(view.newest):
        raise UserError(f"pause: the campaign is already paused (order {number_of(view.newest)})")
    if is_paused(view.newest):
        when = f"it takes effect with the first round committed after round {max(view.round, 0)}"
        raise UserError(f"pause: already ordered (order {number_of(view.newest)}), but not in effect yet; {when}")
    return _next(view, "paused")


def resume(view: CampaignView) -> Control:
    """Continue after a pause, or cancel a stop that no round has applied yet."""
    if _state(view) == "running":
        raise UserError("resume: the campaign is not paused; see spes-p2p status with the same address")
    return _next(view, "running")


def stop(view: CampaignView) -> Control:
    """End the campaign permanently with the current round."""
    return _next(view, "stopped")


def schedule(change: Change, view: CampaignView) -> Control:
    """Change fields of `training` from a round on; of a complete campaign from the next one on, with more steps.

    What such an extension says can be changed until a round applies it.
    """
    control = _next(view, _state(view))
    changes = tuple(sorted((*control.changes, change), key=lambda change: change.round))
    config, problems = view.config, list[str]()
    extends = view.has_ended and change.round == view.round + 1
    try:
        if not (view.is_complete or extends):
            _check_ahead(f"schedule {change.round}", change.round, view)
    except UserError as error:
        problems.append(str(error))
    try:
        for each in changes:
            config = changed(config, each.training, f"schedule {each.round}")
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; and ".join(problems))
    if (view.is_complete and not extends) or (extends and config.training.total_steps <= view.step):
        raise UserError(f"schedule {change.round}: the campaign is complete; give more steps: {_more_steps(view)}")
    reached = _steps_before(change.round, view)
    if "total_steps" in json.loads(change.training) and config.training.total_steps < reached:
        raise UserError(
            f"schedule {change.round}: {reached} steps are trained by then; give more total_steps, an earlier round, or stop"
        )
    return replace(control, changes=changes)


def unschedule(round_number: int, view: CampaignView) -> Control:
    """Take back the changes from a round on, before they are in effect."""
    order, control = f"schedule {round_number}", _next(view, _state(view))
    changes = tuple(each for each in control.changes if each.round != round_number)
    if changes == control.changes:
        ahead = ", ".join(dict.fromkeys(str(each.round) for each in changes if each.round > view.round + 1))
        raise UserError(f"{order}: nothing is ordered from this round on; rounds with changes ahead: {ahead or 'none'}")
    if round_number <= view.round + 1 and not (view.has_ended and round_number == view.round + 1):
        raise UserError(f"{order}: in effect already; order other settings from round {view.round + 2} or later on")
    config = view.config
    for each in changes:
        config = changed(config, each.training, f"{order}: without its settings those of round {each.round} are wrong")
    return replace(control, changes=changes)


def _steps_before(round_number: int, view: CampaignView) -> int:
    """Return the campaign steps in the base before this round, if all rounds until then have work."""
    step, number = view.step, view.round + 1
    changes = () if view.newest is None else view.newest.changes
    for mark in sorted({round_number, *(each.round for each in changes if number < each.round < round_number)}):
        training = scheduled(view.config, view.newest, number).training
        step = max(step, min(step + (mark - number) * training.sync_steps, training.total_steps))
        number = mark
    return step


def require(requirement: Requirement, view: CampaignView) -> Control:
    """Exclude peers below a protocol version from a round on."""
    order = f"require {requirement.protocol}"
    if requirement.protocol > PROTOCOL_VERSION:
        advice = version_advice(PROTOCOL_VERSION, requirement.protocol)
        raise UserError(f"{order}: this program speaks protocol {PROTOCOL_VERSION} itself; {advice}")
    _check_ahead(order, requirement.from_round, view)
    return replace(_next(view, _state(view)), requires=requirement)


def lift(view: CampaignView) -> Control:
    """Require no protocol version any more."""
    control = _next(view, _state(view))
    if control.requires is None:
        raise UserError("require none: no protocol is required")
    return replace(control, requires=None)


def _check_ahead(order: str, round_number: int, view: CampaignView) -> None:
    if round_number <= view.round + 1:
        raise UserError(
            f"{order}: the phase before round {view.round + 1} has started; give round {view.round + 2} or later"
        )


def rollback(round_number: int, view: CampaignView) -> Control:
    """Return to the base of an earlier round and discard later training."""
    possible = [kept for kept in view.archived if kept < view.round]
    if round_number in possible and not may_roll_back(round_number, view.round):
        raise UserError(f"rollback {round_number}: too long ago; a rollback returns at most {ROLLBACK_ROUNDS} rounds")
    if round_number not in possible:
        kept = ", ".join(map(str, possible)) or "none"
        raise UserError(f"rollback {round_number}: no answering peer archives the base of that round; archived rounds: {kept}")
    return replace(_next(view, _state(view)), rollback=round_number)


def ban(peer: str, view: CampaignView) -> Control:
    """Exclude a peer until the ban is lifted."""
    banned = _banned(view)
    if peer == view.owner:
        raise UserError(f"ban {peer}: this is the owner of the campaign, which cannot be banned")
    if peer in banned:
        raise UserError(f"ban {peer}: the peer is banned already (order {number_of(view.newest)})")
    if len(banned) == MAX_BANNED:
        raise UserError(f"ban {peer}: {MAX_BANNED} peers are banned, which is the most; lift a ban with unban first")
    return replace(_next(view, _state(view)), banned=tuple(sorted((*banned, peer))))


def unban(peer: str, view: CampaignView) -> Control:
    """Lift a ban."""
    banned = _banned(view)
    if peer not in banned:
        raise UserError(f"unban {peer}: not banned; banned peers: {', '.join(banned) or 'none'}")
    return replace(_next(view, _state(view)), banned=tuple(each for each in banned if each != peer))


def pardon(peer: str, view: CampaignView) -> Control:
    """Let a peer take part again that a proof excludes. A later proof excludes it again."""
    control = _next(view, _state(view))
    pending = view.pending
    if pending is not None and peer in {each.peer for each in pending.pardons}:
        raise UserError(f"pardon {peer}: the peer is pardoned already, from the next round on (order {pending.number})")
    if peer not in view.excluded:
        raise UserError(f"pardon {peer}: no proof excludes it; excluded peers: {', '.join(view.excluded) or 'none'}")
    others = [each for each in control.pardons if each.peer != peer]
    latest = sorted(others, key=lambda each: each.round)[-(MAX_BANNED - 1) :]
    pardons = sorted((*latest, Pardon(peer, view.round)), key=lambda each: each.peer)
    return replace(control, pardons=tuple(pardons))


def audit(peer: str, view: CampaignView) -> Control:
    """Have vouched trainers train each phase of a peer again."""
    if view.config.admission != "open":
        raise UserError(f"audit {peer}: only open campaigns have audits; this one has admission: {view.config.admission}")
    from spes_p2p.rounds.audits import are_audited  # imports numpy

    if not are_audited(view.config):
        raise UserError(f"audit {peer}: this campaign has no audits: they need sync.audited_share above 0, no sync.overlap, "
                        f"and codecs of 4 bits a value or more; to do without it: ban {peer}")
    if peer in view.trusted:
        raise UserError(f"audit {peer}: you vouch for this peer, and only the phases of others are audited; to do without it: "
                        f"ban {peer}")
    audited = _audited(view)
    if peer in audited:
        raise UserError(f"audit {peer}: the peer is audited already (order {number_of(view.newest)})")
    if len(audited) == MAX_BANNED:
        raise UserError(f"audit {peer}: {MAX_BANNED} peers are audited, which is the most; end one with unaudit first")
    return replace(_next(view, _state(view)), audited=tuple(sorted((*audited, peer))))


def unaudit(peer: str, view: CampaignView) -> Control:
    """Draw a peer by chance only."""
    audited = _audited(view)
    if peer not in audited:
        raise UserError(f"unaudit {peer}: not audited by order; audited peers: {', '.join(audited) or 'none'}")
    return replace(_next(view, _state(view)), audited=tuple(each for each in audited if each != peer))


_ON_PEERS: dict[str, Callable[[str, CampaignView], Control]] = {
    "ban": ban, "unban": unban, "pardon": pardon, "audit": audit, "unaudit": unaudit,
}


def revoked(control: Control, view: CampaignView) -> str:
    """Describe what a new record takes back before any round applied it; "" for nothing."""
    pending = view.pending
    before = "running" if view.applied is None else view.applied.state
    if pending is not None and pending.rollback >= 0:
        return f"order {pending.number} (rolled back to round {pending.rollback})"
    if pending is None or pending.state in (before, control.state):
        return ""
    return f"order {pending.number} ({'resumed' if pending.state == 'running' else pending.state})"


def unreached(control: Control, view: CampaignView) -> str:
    """Say that a new schedule or requirement begins after the campaign's end, as far as that is known; "" if not."""
    before, requires = view.newest, control.requires
    new = [(each.round, f"schedule {each.round}") for each in control.changes if before is None or each not in before.changes]
    if requires is not None and (before is None or requires != before.requires):
        new.append((requires.from_round, "require none"))
    then = replace(view, newest=control)
    for number, opposite in new:
        for begins in {max(view.round + 1, number - 1), number}:
            if _steps_before(begins, then) >= scheduled(view.config, control, begins).training.total_steps:
                return (f"the campaign ends before round {number}, as planned, and what holds from it on has no effect; "
                        f"take it back with control {opposite}")
    return ""


def _banned(view: CampaignView) -> tuple[str, ...]:
    return () if view.newest is None else view.newest.banned


def _audited(view: CampaignView) -> tuple[str, ...]:
    return () if view.newest is None else view.newest.audited


def _state(view: CampaignView) -> CampaignState:
    return "running" if view.newest is None else view.newest.state


def _next(view: CampaignView, state: CampaignState) -> Control:
    if view.newest is None:
        return Control(view.campaign, 1, state, (), -1, b"")
    is_still = state == view.newest.state == "paused"
    return replace(view.newest, number=view.newest.number + 1, state=state, rollback=-1, signature=b"",
                   by_guard=view.newest.by_guard and is_still)

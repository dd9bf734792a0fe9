"""`spes-p2p me`: what the trainer with a run-dir has contributed.

Tokens, rounds and experts are those of certified commits that the trainer applied, as it wrote them down; what nobody else
vouches for, its hours, is called its own. Rounds that its journal has lost count by the records that it took over from others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p.campaign.files import read_run_dir
from spes_p2p.client.worth import worth_of
from spes_p2p.consensus.control import takes_part
from spes_p2p.consensus.output import LOG
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import Probation, RoundRecord
from spes_p2p.net.identity import RSAIdentity, Visitor
from spes_p2p.observe.contributed import Contributed
from spes_p2p.observe.events import BaseRestored, Controlled, Event, PeerStarted, RoundCommitted
from spes_p2p.observe.history import HISTORY_FILE, read_journal
from spes_p2p.observe.pace import pace_s
from spes_p2p.observe.swarm_status import gather, own_standing
from spes_p2p.observe.units import human_count, human_indices, human_loss, human_seconds, short_peer
from spes_p2p.observe.worth import Worth
from spes_p2p.session.apart import Progress
from spes_p2p.session.own_state import OwnState, read_own_state, require_used, state_line


class StillPreparing(UserError):
    """The trainer runs and has not stored its campaign yet."""


@dataclass(frozen=True)
class OwnShare:
    """What one trainer contributed to a campaign."""

    peer_id: str
    state: str
    """preparing, running, pausing, paused; not running."""
    detail: str
    tokens: int
    """Trained here and in the base."""
    share: float
    """Share of all tokens in the base of `share_round`, 0 to 1; NaN before the first."""
    share_round: int
    """The last round in that base, which may be newer than its own."""
    rounds: int
    """Committed rounds with work of this trainer."""
    expert_steps: int
    """Local steps times experts trained in them, in these rounds."""
    experts: tuple[int, ...]
    """Experts that it trains now."""
    hours: float
    """Spent in training steps, by its own clock, also for work that no round includes."""
    round: int
    """The last round in its base."""
    total_rounds: int
    next_round_s: float
    """Expected time to the next round; NaN: unknown, or the owner lets no round follow."""
    owned: tuple[int, ...]
    """Experts that were its own after the last round in its journal, also when it does not run."""
    campaign_state: str
    """As far as its journal goes: running, paused, stopped, done."""
    trains: bool = False
    """Whether it trains; one that runs may wait."""
    worth: Worth | None = None
    """None: not measured."""
    name: str = ""
    """What it calls itself; empty: nothing."""
    team: str = ""
    standing: str | None = None
    """In an open campaign: vouched, proven (past probation), newcomer; in any: excluded."""
    probation: Probation | None = None
    """Of a newcomer."""
    others: tuple[str, ...] = ()
    """Other identities that have used the run-dir; what the journal has of them does not count."""
    is_lost: bool = False
    """Whether the run-dir has commits, and its journal nothing."""


def own_share(
    entries: Iterable[tuple[float, Event | RoundRecord]], peer_id: str, planned_rounds: int, state: OwnState | None, now: float
) -> OwnShare:
    """Sum a trainer's journal, with the Unix time of each entry; `now` is one, too.

    `planned_rounds`: of the campaign, unless its owner changed them.
    """
    commit_times: dict[int, float] = {}
    base: RoundCommitted | BaseRestored | None = None
    owners: tuple[tuple[str, ...], ...] = ()
    total_rounds, own, campaign_state = planned_rounds, Contributed(peer_id), "running"
    others: dict[str, None] = {}
    name, team = "", ""
    for at, entry in entries:
        own.see(entry)
        if isinstance(entry, PeerStarted) and entry.peer_id != peer_id:
            others[entry.peer_id] = None
        if isinstance(entry, Controlled):
            campaign_state = entry.state
        if isinstance(entry, RoundCommitted):
            commit_times[entry.round] = at
            name, team = {peer: (its_name, its_team) for peer, its_name, its_team in entry.names}.get(peer_id, (name, team))
        if isinstance(entry, RoundCommitted | BaseRestored):
            base = entry
            total_rounds, owners = base.total_rounds or total_rounds, base.owners or owners
    is_running = state is not None and state.state == "running"
    if campaign_state == "running" and base is not None and base.round >= total_rounds:
        campaign_state = "done"
    goes_on = is_running and campaign_state == "running"
    owned = tuple(expert for expert, who in enumerate(owners) if peer_id in who)
    return OwnShare(
        peer_id=peer_id,
        state=state.state if state else "not running",
        detail=state.detail if state else "",
        tokens=own.tokens,
        share=own.tokens / base.total_tokens if base is not None and base.total_tokens else math.nan,
        share_round=max(0, base.round) if base is not None else 0,
        rounds=own.rounds,
        expert_steps=own.expert_steps,
        experts=owned if is_running else (),
        hours=own.trained_s / 3600,
        round=max(0, base.round) if base is not None else 0,
        total_rounds=total_rounds,
        next_round_s=_next_round_s(list(commit_times.values()), now) if goes_on else math.nan,
        owned=owned,
        campaign_state=campaign_state,
        trains=state is not None and state.trains,
        name=name,
        team=team,
        others=tuple(others),
    )


def _next_round_s(times: Sequence[float], now: float) -> float:
    pace = pace_s(times)
    return max(0.0, times[-1] + pace - now) if math.isfinite(pace) else math.nan


def look_at(run_dir: Path, identity: Path | None = None) -> OwnShare:
    """Return what the trainer with this run-dir has contributed, by default under the identity that used it last.

    Raises StillPreparing, and UserError if it is not a trainer's run-dir.
    """
    require_used(run_dir)
    state, known = read_own_state(run_dir), read_run_dir(run_dir)
    if known is None and state is not None and state.is_preparing:
        raise StillPreparing(f"{run_dir}: the trainer is still preparing; try again in a minute")
    if known is None:
        raise UserError(f"{run_dir}: the trainer ended or paused before it had its campaign; start it again, or resume it")
    journal = read_journal(run_dir) if (run_dir / HISTORY_FILE).exists() else []
    started = [] if identity else [entry.peer_id for _, entry in journal if isinstance(entry, PeerStarted)]
    peer_id = started[-1] if started else _peer_of(identity or run_dir / "identity.key")
    share = own_share(journal, peer_id, known[0].campaign.config.total_rounds, state, time.time())
    return replace(share, is_lost=not journal and (run_dir / LOG).exists())


def _peer_of(identity: Path) -> str:
    if not identity.exists():
        raise UserError(f"{identity}: no such file; give the --identity with which the trainer joined")
    return RSAIdentity(identity).peer_id


def with_standing(share: OwnShare, run_dir: Path) -> OwnShare:
    """Return it with what the commits in the run-dir say of its standing. Raises UserError."""
    from spes_p2p.campaign.invitations import kept
    from spes_p2p.peer.durable import read_log  # imports numpy
    from spes_p2p.session.admission import standing_in
    from spes_p2p.storage.store import DirectoryStore

    known, me = read_run_dir(run_dir), share.peer_id
    if known is None:
        return share
    log = read_log(DirectoryStore(run_dir), known[1], Visitor(me))
    if not takes_part(log.last, me):
        return replace(share, standing="excluded", probation=None)
    standing, probation = standing_in(log, me, known[0].campaign.config, kept(run_dir))
    return replace(share, standing=standing, probation=probation)


def look_at_worth(run_dir: Path, identity: Path | None, data_dirs: Sequence[Path], on_progress: Progress) -> OwnShare:
    """Like `look_at`, with what its experts are worth, which takes minutes. Raises UserError if that cannot be measured."""
    state = read_own_state(run_dir)
    worth = worth_of(run_dir, look_at(run_dir, identity).owned, state.addresses if state else (), data_dirs, on_progress)
    return replace(look_at(run_dir, identity), worth=worth)


def as_of(share: OwnShare, newest_round: int, total_tokens: int) -> OwnShare:
    """Return it with its share of the swarm's newest base; a trainer that is paused does not learn of that."""
    if newest_round <= share.round:
        return share
    return replace(share, share=share.tokens / max(1, total_tokens), share_round=newest_round)


async def as_the_swarm_says(share: OwnShare, run_dir: Path) -> OwnShare:
    """Return it as of the newest base of the swarm, of which the trainer knows addresses; unchanged if no peer answers."""
    from spes_p2p.client.status import fetch_statuses

    state = read_own_state(run_dir)
    if state is None or not state.addresses:
        return share
    with suppress(UserError):
        if statuses := await fetch_statuses(state.addresses, state.spare_addresses):
            swarm = gather(statuses)
            return as_of(share, swarm.round, swarm.total_tokens)
    return share


def render(share: OwnShare) -> str:
    """For people."""
    up_to, here = ("the swarm's round", " here") if share.share_round > share.round else ("round", "")
    until = "" if share.state == "running" else f" up to {up_to} {share.share_round}"  # others may have gone on
    of_all = f", {100 * share.share:.1f} % of all{until}" if math.isfinite(share.share) else ""
    when = f"in about {human_seconds(share.next_round_s)}" if share.next_round_s else "is due"
    coming = f"; the next {when}" if math.isfinite(share.next_round_s) else ""
    coming = coming if share.campaign_state == "running" else f"; the campaign is {share.campaign_state}"
    worth = share.worth
    others = ", ".join(map(short_peer, share.others))
    called = [f"{share.name} {short_peer(share.peer_id)}".lstrip(), *([share.team] if share.team else [])]
    return "\n".join([
        f"{', '.join(called)} · {state_line(share.state, share.detail, share.trains)}",
        f"  tokens   {human_count(share.tokens)} trained here are in the model{of_all}",
        f"  rounds   work of this trainer in {share.rounds}; the base{here} is of round {share.round}/{share.total_rounds}"
        f"{coming}",
        *([f"  standing {own_standing(share.standing, share.probation)}"] if share.standing else []),
        f"  experts  {human_indices(share.experts)} now; {human_count(share.expert_steps)} steps of experts in all",
        f"  time     {human_seconds(3600 * share.hours)} in training steps, by this machine's clock",
        *([f"  journal  other entries are another identity's ({others}) and do not count here"] if others else []),
        *([f"  journal  {HISTORY_FILE} is lost, so nothing above counts what came before; once the trainer runs again, it "
           "asks others for the past"] if share.is_lost else []),
        *([] if worth is None else [
            f"  worth    experts {human_indices(worth.experts)}: {worth.nats:+.4f} ± {worth.error:.4f} nats per token; "
            f"held-out loss {human_loss(worth.loss)}, without them {human_loss(worth.loss_without)} (base {worth.round})"]),
    ])

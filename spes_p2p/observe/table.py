"""The swarm as a table: printed once, kept live on a terminal, or one line per round elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spes_p2p.messages.presence import PeerStatus
from spes_p2p.observe.fitting import FittingTable
from spes_p2p.observe.swarm_status import NO_MAJORITY, SwarmStatus, gather, lacking_vouched, progress_of, sync_seconds
from spes_p2p.observe.units import (
    UNKNOWN,
    counted,
    human_bytes,
    human_count,
    human_indices,
    human_loss,
    human_rate,
    human_scores,
    human_seconds,
    percent,
    short_peer,
    time_left,
)

GRID_EXPERTS = 32
"""Up to this many experts, the table shows ownership as a grid; beyond, as ranges of numbers."""

COLUMNS = ("peer", "round", "now", "loss", "tok/s", "experts", "up", "down", "sync")
NARROW_WITHOUT = ("sync", "down", "up", "experts", "tok/s", "loss")
"""Columns that a narrow terminal lacks, the first to go first."""

_STAGE_STYLES = {"training": "green", "downloading": "cyan", "joining": "cyan", "waiting": "dim", "leaving": "yellow"}


def render_status(statuses: Sequence[PeerStatus], notes: Sequence[str] = ()) -> RenderableType:
    """Render progress, the last round, one row per peer, and problems, followed by `notes`."""
    if not statuses:
        return Group(Text("no peer has answered yet", "dim"), *_warnings(notes))
    swarm = gather(statuses)
    orders = [f"ordered by the owner: {swarm.control}"] if swarm.control else []
    orders += [f"ordered by the owner, not in effect yet: {swarm.pending}"] if swarm.pending else []
    last_round = [_last_round(swarm)] if swarm.round > 0 and swarm.round_seconds else []
    return Group(
        _headline(swarm),
        _progress(swarm),
        _losses(swarm),
        *(Text(order, "bold yellow") for order in orders),
        *last_round,
        Text(),
        FittingTable(partial(_peer_table, swarm), NARROW_WITHOUT),
        *_standings(swarm),
        *_task_scores(swarm),
        *_warnings([*troubles(swarm), *notes]),
    )


def round_line(statuses: Sequence[PeerStatus]) -> str:
    """Return the state of the swarm in one line; `statuses` must not be empty."""
    swarm = gather(statuses)
    parts = _assembled(swarm) if swarm.round == 0 else _trained(swarm)
    return " · ".join(part for part in (f"round {swarm.round}/{swarm.total_rounds}", *parts, *troubles(swarm)) if part)


def _assembled(swarm: SwarmStatus) -> list[str]:
    if not swarm.assembled:
        return [f"assembling the swarm: {_trainers_so_far(swarm)}"]
    return [f"swarm assembled: {_trainers(swarm)}", f"{len(swarm.owners)} experts per layer"]


def _trained(swarm: SwarmStatus) -> list[str]:
    sent = [status.round_sent_bytes for status in swarm.peers if status.round == swarm.round and status.members]
    seconds = human_seconds(sync_seconds(swarm.round_seconds))
    return [
        f"loss {human_loss(swarm.loss)}",
        f"held-out {_held_out(swarm)}",
        human_rate(swarm.tokens_per_second),
        _trainers(swarm),
        f"{human_bytes(sum(sent) / len(sent))} up per peer in {seconds}" if sent else "",
        _when_done(swarm),
    ]


def _when_done(swarm: SwarmStatus) -> str:
    if swarm.done and swarm.state != "stopped":
        return "done"
    if swarm.state != "running":
        return swarm.state
    return "waits" if swarm.waits else time_left(swarm.seconds_left)


def _held_out(swarm: SwarmStatus) -> str:
    of_round = swarm.validation_round
    stale = math.isfinite(swarm.validation_loss) and of_round != swarm.round
    return human_loss(swarm.validation_loss) + (f" (round {of_round})" if stale else "")


def _trainers(swarm: SwarmStatus) -> str:
    return counted(sum(status.role == "trainer" for status in swarm.peers), "trainer")


def _trainers_so_far(swarm: SwarmStatus) -> str:
    here = sum(status.role == "trainer" for status in swarm.peers)
    return f"{f'{here} of ' if here < swarm.min_peers else ''}{counted(max(here, swarm.min_peers), 'trainer')} so far"


class SwarmView:
    """Shows a swarm until it is closed. The caller queries the peers and passes their answers to `update`."""

    def __init__(
        self, console: Console | None = None, line: Callable[[Sequence[PeerStatus]], str] = round_line, live: bool = True
    ):
        """Show a live table on a terminal, if `live`; otherwise print one `line` per committed round."""
        self._console = console or Console()
        self._line = line
        self._live = Live(console=self._console, auto_refresh=False) if live and self._console.is_terminal else None
        self._printed_round = -1
        self._printed_notes: set[str] = set()

    def __enter__(self) -> SwarmView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, statuses: Sequence[PeerStatus], notes: Sequence[str] = ()) -> None:
        """Show the peers' latest answers; `notes` are additional lines, such as 'peer 3 ended with code 1'."""
        if self._live:
            self._live.update(render_status(statuses, notes), refresh=True)
        else:
            self._print(statuses, notes)

    def _print(self, statuses: Sequence[PeerStatus], notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self._printed_notes:
                self._printed_notes.add(note)
                self._console.out(note, highlight=False)
        # A peer that only downloaded the base has no members and no data of the round.
        committed = max((status.round for status in statuses if status.members), default=-1)
        if committed > self._printed_round:
            self._printed_round = committed
            self._console.out(self._line(statuses), highlight=False)


def _warnings(lines: Sequence[str]) -> list[Text]:
    return [Text(f"! {line}", "yellow") for line in lines]


def _headline(swarm: SwarmStatus) -> Text:
    line = Text()
    line.append(swarm.campaign, "bold")
    line.append(f" {swarm.campaign_hash[:8]}   ", "dim")
    line.append(f"round {swarm.round}/{swarm.total_rounds}", "bold")
    if swarm.total_steps:
        line.append(f"   {human_count(swarm.total_tokens)} tokens")
    line.append("   ")
    if swarm.assembled:
        line.append(_when_done(swarm), "bold")
    else:
        line.append(f"assembling, {_trainers_so_far(swarm)}", "bold")
    return line


def _progress(swarm: SwarmStatus) -> RenderableType:
    line = Table.grid()
    line.add_row(ProgressBar(total=max(1, swarm.total_rounds), completed=swarm.round, width=79, complete_style="green"))
    return line


def _losses(swarm: SwarmStatus) -> Text:
    line = Text("loss ")
    line.append(human_loss(swarm.loss), "bold green")
    line.append("  held-out ")
    line.append(_held_out(swarm), "bold green")
    line.append(f"  {human_count(swarm.tokens_per_second)} tok/s", "bold")
    if swarm.base_digest:
        line.append(f"  base {swarm.base_digest[:8]}", "dim")
    if swarm.merge_alpha:
        line.append(f"  merge {swarm.merge_alpha:.3f}", "dim")
    return line


def _last_round(swarm: SwarmStatus) -> Text:
    parts = [
        f"last round: {human_count(swarm.round_tokens)} tok",
        f"train {human_seconds(swarm.round_seconds['train'])}" if "train" in swarm.round_seconds else "",
        f"sync {human_seconds(sync_seconds(swarm.round_seconds))}",
        f"{human_bytes(swarm.round_sent_bytes)} up",
        f"{human_bytes(swarm.round_received_bytes)} down",
    ]
    return Text(" · ".join(part for part in parts if part), "dim")


def _peer_table(swarm: SwarmStatus, without: Collection[str] = ()) -> Table:
    experts = len(swarm.owners)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    kept = [i for i, name in enumerate(COLUMNS) if name not in without]
    for name in (COLUMNS[i] for i in kept):
        is_text = name in ("peer", "round", "now", "experts")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "experts" or experts <= GRID_EXPERTS)
    for status in swarm.peers:
        row = _peer_row(replace(status, stage=_stage(status, swarm)), experts)
        table.add_row(*(row[i] for i in kept))
    return table


def _stage(status: PeerStatus, swarm: SwarmStatus) -> str:
    if swarm.done and status.round >= min(swarm.round, status.total_rounds):
        return "done"
    return "waiting" if swarm.awaits_trainers and status.stage == "announcing" else status.stage


def _peer_row(status: PeerStatus, experts: int) -> tuple[Text, ...]:
    trains = status.role == "trainer"
    is_counted = status.stage == "training" and status.steps_planned
    now = f"training {percent(status.steps_done, status.steps_planned)}" if is_counted else status.stage
    return (
        Text(short_peer(status.peer_id), "" if trains else "dim"),
        Text(str(status.round) if status.base_digest else UNKNOWN),
        Text(now if trains else status.role, _STAGE_STYLES.get(status.stage, "") if trains else "dim"),
        Text(human_loss(status.local_loss)),
        Text(human_count(status.tokens_per_second) if trains else UNKNOWN),
        _owned(status, experts) if trains else Text(UNKNOWN),
        Text(human_bytes(status.round_sent_bytes)),
        Text(human_bytes(status.round_received_bytes)),
        Text(human_seconds(sync_seconds(status.round_seconds)) if status.round_seconds else UNKNOWN),
    )


def _standings(swarm: SwarmStatus) -> list[Text]:
    """Say whom the owner of an open campaign vouches for, and how far the others are."""
    words = {"vouched": "the owner vouches for", "proven": "past probation", "newcomer": "on probation"}
    lines = []
    for standing, text in words.items():
        peers = [f"{short_peer(each.peer_id)}{_served(each)}" for each in swarm.trainers if each.standing == standing]
        lines += [Text(f"{text}: {', '.join(peers)}")] if peers else []
    return lines


def _served(status: PeerStatus) -> str:
    probation = status.probation if status.standing == "newcomer" else None
    return f" ({progress_of(probation)})" if probation is not None else ""


def _task_scores(swarm: SwarmStatus) -> list[Text]:
    return [
        Text(f"{short_peer(each.peer_id)} measured on base {each.task_round}: {human_scores(each.task_scores)}")
        for each in swarm.peers if each.task_scores
    ]


def _owned(status: PeerStatus, experts: int) -> Text:
    if experts > GRID_EXPERTS:
        return Text(human_indices(status.owned))
    grid = Text()
    for expert in range(experts):
        grid.append(*(("■", "green") if expert in status.owned else ("·", "dim")))
    return grid


def troubles(swarm: SwarmStatus) -> list[str]:
    """Return one line per problem."""
    found = []
    if swarm.ownerless:
        found.append(f"no peer trains expert {human_indices(swarm.ownerless)}")
    if not swarm.digests_equal:
        found.append(f"peers at round {swarm.round} hold different bases")
    if swarm.is_asleep and swarm.state != "stopped":
        found.append("no trainer is here; rounds go on when one joins")
    elif swarm.electors_missing and not swarm.done:
        missing = ", ".join(short_peer(peer) for peer in swarm.electors_missing)
        wait = f"; {NO_MAJORITY}" if swarm.majority_missing else ""
        silent = f"{len(swarm.electors_missing)} of {counted(len(swarm.electorate), 'elector')}"
        found.append(f"no answer from {silent} ({missing}){wait}")
    if swarm.lacks_vouched:
        found.append(lacking_vouched(swarm.assembled, swarm.rounds_go_on))
    if swarm.failing and not swarm.is_asleep:
        reasons = ", ".join(f"{reason} {count}" for reason, count in swarm.failing.items())
        found.append(f"failed attempts at round {swarm.round + 1} so far: {reasons}")
    return found

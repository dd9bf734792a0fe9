"""A live progress line below the log of a peer, on terminals only."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from spes_p2p.observe.events import DownloadProgress, Event, PeersSeen, StateEntered, TrainingProgress
from spes_p2p.observe.status import StatusBoard
from spes_p2p.observe.swarm_status import gather
from spes_p2p.observe.units import human_rate, percent

DOING = {
    "joining": "joining the swarm",
    "downloading": "waiting for a peer that has the base",
    "training": "training",
    "announcing": "waiting for the plan",
    "exchanging": "exchanging updates",
    "committing": "waiting for the electors' votes",
    "applying": "applying the round",
    "evaluating": "evaluating on held-out text",
    "waiting": "serving",
    "leaving": "leaving",
}


class ProgressLine:
    """Observer that updates the line from `start` to `close`."""

    def __init__(self, board: StatusBoard, console: Console | None = None):
        """`board` must receive each event before this observer. The default console is stderr, like the log's."""
        self._board = board
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[detail]}", style="dim"),
            TimeElapsedColumn(), console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, detail="")

    @property
    def renderable(self) -> RenderableType:
        """The current line."""
        return self._progress.get_renderable()

    def start(self) -> None:
        """Show the line."""
        self._progress.start()

    def close(self) -> None:
        """Remove the line. Idempotent."""
        self._progress.stop()

    def update(self, event: Event) -> None:
        """Update the line."""
        match event:
            case StateEntered():
                self._progress.reset(self._task, total=None, description=self._description(event.name), detail="")
            case PeersSeen() if self._board.status.stage in ("announcing", "waiting"):
                self._progress.update(self._task, description=self._description(self._board.status.stage))
            case TrainingProgress():
                speed = human_rate(event.tokens_per_second)
                self._bar(event.steps_done, event.steps_planned, f"{percent(event.steps_done, event.steps_planned)} · {speed}")
            case DownloadProgress():
                self._progress.update(self._task, description=f"downloading {event.what}")
                self._bar(event.done, event.total, percent(event.done, event.total))

    def _description(self, stage: str) -> str:
        status = self._board.status
        if stage == "waiting" and gather([status]).done:
            return "the campaign is over · serving its model"
        if not status.has_begun and stage in ("announcing", "waiting") and status.trainers_alive < status.min_peers:
            return f"waiting for trainers: {status.trainers_alive} of {status.min_peers}"
        if not status.has_begun and stage == "announcing" and status.vouched_alive == 0:
            return "waiting for a trainer that the owner vouches for"
        round_number = min(status.round + 1, status.total_rounds) if status.has_begun else 0
        return f"round {round_number} · {DOING.get(stage, stage)}"

    def _bar(self, done: int, total: int, detail: str) -> None:
        self._progress.update(self._task, completed=done, total=max(1, total), detail=detail)

"""Experiment trackers: wandb, or trackio, which has the same API. Metrics of a peer are logged once per round."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

from spes_p2p.errors import UserError, first_line
from spes_p2p.observe import events
from spes_p2p.observe.events import Event, RoundCommitted, seconds_by_stage

logger = logging.getLogger(__name__)


class Run(Protocol):
    """The run that `init` of both libraries returns."""

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Queue metrics for a step, without blocking."""

    def finish(self) -> None:
        """Flush the queue."""


class Tracker:
    """Observer that logs to a run of wandb or trackio; steps are rounds. A failing tracker does not stop training."""

    def __init__(self, library: str, project: str, name: str, config: Mapping[str, Any]):
        """`library`: wandb or trackio. Raises UserError if it is not installed or cannot start a run."""
        try:
            module = importlib.import_module(library)
        except ImportError:
            raise UserError(f"--tracker {library}: not installed on this machine; pip install {library}") from None
        try:
            self._run: Run | None = module.init(project=project, name=name, config=dict(config))
        except Exception as error:
            reason = first_line(error)
            raise UserError(f"--tracker {library}: cannot start a run ({reason}); fix that, or omit --tracker") from None
        self._round = 0
        self._failures = 0

    def log(self, event: Event) -> None:
        """Log the metrics of the event."""
        match event:
            case events.PhaseTrained():
                speed = event.tokens / event.seconds if event.seconds > 0 else math.nan
                numbers = {"peer/loss": event.loss, "peer/auxiliary_loss": event.aux_loss, "peer/tokens_per_second": speed}
                self._write(event.round, {**numbers, "peer/skipped_steps": event.skipped_steps})
            case RoundCommitted():
                self._write(event.round, _of_round(event))
            case events.Evaluated():
                self._write(event.round, {"held_out_loss": event.validation_loss})
            case events.RoundFailed():
                self._failures += 1
                self._write(event.round, {"peer/failed_attempts": self._failures})
            case events.WorkDropped():
                self._write(event.round, {"peer/dropped_tokens": event.tokens})
            case events.DigestMismatch():
                self._write(event.round, {"peer/digest_mismatch": 1})

    def close(self) -> None:
        """Flush the tracker."""
        if self._run is not None:
            self._guarded(self._run.finish)

    def _write(self, round_number: int, numbers: Mapping[str, float]) -> None:
        """Log at this round; trackers need nondecreasing steps, so an earlier round counts as the newest one."""
        self._round = max(self._round, round_number)
        known = {name: float(number) for name, number in numbers.items() if math.isfinite(number)}
        if self._run is not None and known:
            self._guarded(self._run.log, known, step=self._round)

    def _guarded(self, call: Any, *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except Exception as error:
            logger.warning("the tracker failed (%s); training continues without it", error)
            self._run = None


def _of_round(event: RoundCommitted) -> dict[str, float]:
    return {
        "loss": event.loss,
        "tokens": event.total_tokens,
        "campaign_step": event.campaign_step,
        "learning_rate": event.learning_rate,
        "merge_alpha": event.merge_alpha,
        "members": len(event.members),
        "experts_without_owner": sum(not owners for owners in event.owners),
        "dropped_parts": event.dropped_parts,
        "peer/sent_bytes": event.sent_bytes,
        "peer/received_bytes": event.received_bytes,
        **{f"peer/seconds/{stage}": seconds for stage, seconds in seconds_by_stage(event.seconds).items()},
    }

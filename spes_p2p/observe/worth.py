"""What a peer's experts were worth when `spes-p2p me --worth` measured it last, as its run-dir keeps it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

WORTH_FILE = "worth.json"
"""In the run-dir: the last result, which holds as long as base and experts are the same."""


@dataclass(frozen=True)
class Worth:
    """Held-out losses in nats per token."""

    round: int
    """The last round in the base."""
    digest: str
    """Of the base."""
    experts: tuple[int, ...]
    samples: int
    loss: float
    loss_without: float
    """When the tokens of these experts go to others."""
    error: float
    """Standard error of the difference, paired by sample."""

    @property
    def nats(self) -> float:
        """How much the experts lower the loss."""
        return self.loss_without - self.loss


def kept_worth(run_dir: Path) -> Worth | None:
    """Return the last result, None if there is none."""
    try:
        found = json.loads((run_dir / WORTH_FILE).read_bytes())
        return Worth(**{**found, "experts": tuple(found["experts"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None

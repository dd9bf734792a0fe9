"""What a coordinator of one round needs of the peer that it runs on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.output import Identity
from spes_p2p.content.relay import Relay
from spes_p2p.messages.consensus import CertifiedCommit, Commit, Control, Farewell
from spes_p2p.messages.rounds import Plan
from spes_p2p.messages.samples import Interval
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.rounds.merge import Donors
from spes_p2p.rounds.plan import Rules
from spes_p2p.rounds.results import Results


class AttemptFailed(Exception):
    """This attempt will not come to a decision; nothing was applied."""


@dataclass(frozen=True)
class RoundContext:
    """One round, and the peer that coordinates it."""

    commit: Commit
    """The last one: the round is the one after it."""
    board: RpcEndpoint
    log: CommitLog
    identity: Identity
    rules: Rules
    relay: Relay
    phase_began: float
    """Loop time."""
    assignments: Mapping[str, int]
    """Steps of this phase by peer."""
    straggler_delay: Sequence[float]
    """Of members in earlier rounds (`deadline.py`)."""
    too_late: set[str]
    """Peers that came too late for a round and were in none since. Kept by the coordinator from round to round."""
    returned: Callable[[], Mapping[str, tuple[Interval, ...]]]
    """What each peer that left this round by now gave back."""
    farewells: Callable[[], tuple[Farewell, ...]]
    newest_control: Callable[[], Control | None]
    results_of: Callable[[Plan], Results]
    donors: Callable[[], Awaitable[Donors]]
    learn: Callable[[CertifiedCommit], None]

    def require_open(self) -> None:
        """Raises AttemptFailed when another coordinator has brought this round to its decision."""
        if self.log.last.id != self.commit.id:
            raise AttemptFailed("this round is decided already")

"""What one peer has contributed to the base, summed from its own events, and from others' records of rounds that these lack."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe.events import BaseRestored, Event, PeerStarted, PhaseTrained, RoundCommitted


class Contributed:
    """Observer that sums a peer's work in certified rounds, without rounds that a rollback or a reform took back."""

    def __init__(self, peer_id: str):
        self._peer_id, self._is_own = peer_id, True
        self._rounds: dict[int, tuple[int, int]] = {}
        """Tokens and expert-steps by round; a round that is applied again counts once."""
        self.trained_s = 0.0
        """Seconds spent in training steps, by the peer's own clock, also for work that no round includes."""

    @property
    def tokens(self) -> int:
        """Tokens that this peer trained and that are in the base."""
        return sum(tokens for tokens, _ in self._rounds.values())

    @property
    def rounds(self) -> int:
        """Committed rounds with work of this peer."""
        return len(self._rounds)

    @property
    def expert_steps(self) -> int:
        """Local steps times experts trained in them, in these rounds."""
        return sum(steps for _, steps in self._rounds.values())

    def see(self, event: Event | RoundRecord) -> None:
        """Count the event."""
        match event:
            case RoundCommitted():
                self._rounds.pop(event.round, None)
                self._take(event.round, event.contributions)
            case RoundRecord() if event.round not in self._rounds:
                self._take(event.round, ((each.peer, each.tokens, each.expert_steps) for each in event.contributions))
            case BaseRestored() if event.source in ("rollback", "reform"):
                self._rounds = {number: work for number, work in self._rounds.items() if number <= event.round}
            case PeerStarted():
                self._is_own = event.peer_id == self._peer_id
            case PhaseTrained() if self._is_own:
                self.trained_s += event.seconds

    def _take(self, number: int, contributions: Iterable[tuple[str, int, int]]) -> None:
        own = [(tokens, steps) for peer, tokens, steps in contributions if peer == self._peer_id and tokens]
        if own:
            self._rounds[number] = own[0]

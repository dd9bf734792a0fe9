"""The slow form of the simulator: a bootstrap peer and trainers as processes on this machine, with kill -9, SIGSTOP and so on.

Faults strike at a random moment of a round, or when a peer reaches a named point: there it stops itself (`trial.py`) until the
simulation has acted. The peers' histories are the only source of events; the rules are those of the virtual form (`audit.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from spes_p2p.client.local_swarm import last_line
from spes_p2p.errors import UserError
from spes_p2p.observe.events import Evaluated, RoundCommitted
from spes_p2p.observe.history import HISTORY_FILE, Entry, read_history
from spes_p2p.testing.simulate.audit import Audit
from spes_p2p.testing.simulate.decisions import Held, commits_of, compare
from spes_p2p.testing.simulate.namespaces import Namespaces
from spes_p2p.testing.simulate.process_injector import ProcessInjector
from spes_p2p.testing.simulate.process_swarm import POLL_S, Process, ProcessSwarm
from spes_p2p.testing.simulate.report import Attacked, RunReport, found_out
from spes_p2p.testing.simulate.scenario import Scenario
from spes_p2p.testing.simulate.trial_peer import LIES_FILE

STUCK_S = 180.0
QUIET_ROUNDS = 2
"""Rounds that every trainer must commit after the last fault."""
SETTLED_S = 0.5
"""What peers wrote since is read later: events of several peers come in the order of time."""
FAULTS_FILE = "faults.txt"


def run_processes(
    scenario: Scenario, config: Path, run_dir: Path, seed: int, on_round: Callable[[int, int], None]
) -> tuple[RunReport, list[dict[str, float]]]:
    """Run until the rounds are committed by all, or a peer makes no progress; return results and held-out losses by round.

    Raises UserError.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"--run-dir {run_dir}: not empty; name a new folder")
    run_dir.mkdir(parents=True, exist_ok=True)
    uses_partitions = "partition" in scenario.kinds or any(fault.kind == "partition" for fault in scenario.faults)
    with contextlib.closing(Namespaces()) if uses_partitions else contextlib.nullcontext() as machines:
        run = _Run(scenario, config, run_dir, seed, machines, on_round)
        try:
            run.main()
        finally:
            run.end()
    return run.result()


class _Run:
    """One swarm of processes, its faults, and what its histories say."""

    def __init__(
        self,
        scenario: Scenario,
        config: Path,
        run_dir: Path,
        seed: int,
        machines: Namespaces | None,
        on_round: Callable[[int, int], None],
    ):
        self._scenario, self._seed, self._on_round = scenario, seed, on_round
        self._audit = Audit(0, overlap=scenario.overlap)
        self._swarm = ProcessSwarm(scenario, config, run_dir, machines, self._audit)
        self._injector = ProcessInjector(self._swarm, scenario, seed, machines, run_dir / FAULTS_FILE)
        self._losses: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._bases: list[Held] = []
        self._orphans = 0
        self._rounds_done = 0

    def main(self) -> None:
        """Start all peers, let the faults strike, and wait until all peers have continued."""
        self._swarm.start_all()
        if self._until(lambda: self._audit.newest_round >= self._scenario.rounds):
            self._injector.lift()
            goal = self._audit.newest_round + QUIET_ROUNDS
            self._until(lambda: self._all_have(goal))

    def _all_have(self, goal: int) -> bool:
        """Return whether all trainers have committed the last quiet round; tell how many of them all have."""
        left = max(0, goal - min((peer.round for peer in self._swarm.trainers()), default=goal))
        self._done(self._scenario.rounds + max(0, QUIET_ROUNDS - left))
        return not left

    def _done(self, rounds: int) -> None:
        self._rounds_done = max(self._rounds_done, rounds)
        self._on_round(self._rounds_done, self._scenario.rounds + QUIET_ROUNDS)

    def end(self) -> None:
        """Ask all peers to leave; compare what they decided, and count processes that survive."""
        self._injector.let_go()
        self._orphans = self._swarm.end()
        logs = {peer.name: commits_of(peer.folder) for peer in self._swarm.honest()}
        compare(self._audit, self._swarm.now_s(), logs, self._bases)

    def result(self) -> tuple[RunReport, list[dict[str, float]]]:
        """Return the results and the held-out losses; what was pending when the peers left counts as lost."""
        violations = tuple(self._audit.violations)
        figures = self._audit.figures(pending_tokens=0)
        report = RunReport(
            self._seed, figures, violations, dict(self._injector.struck), dict(self._injector.struck_at), self._orphans,
            attacked=self._attacked() if self._scenario.attackers else None,
        )
        losses = [
            {"round": number, "total_tokens": self._tokens[number], "loss": loss}
            for number, loss in sorted(self._losses.items())
            if number in self._tokens
        ]
        return report, losses

    def _attacked(self) -> Attacked:
        honest = self._swarm.honest()
        told = [self._swarm.peers[name].folder / LIES_FILE for name in self._scenario.liars if name in self._swarm.peers]
        return Attacked(
            self._scenario.attack, self._losses.get(self._scenario.rounds),
            max((peer.memory_most - peer.memory_before for peer in honest if peer.memory_before), default=None),
            sum(len(path.read_text().splitlines()) for path in told if path.exists()),
            are_captured=self._scenario.are_captured,
            **found_out((commits_of(peer.folder) for peer in honest), self._audit.liars),
        )

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if a peer ends, or makes no progress."""
        moved: dict[str, tuple[int, float]] = {}
        while not condition():
            time.sleep(POLL_S)
            self._read_histories()
            self._injector.strike_reached()
            self._injector.strike_due()
            for peer in self._swarm.trainers():
                if peer.name not in moved or moved[peer.name][0] != peer.round:
                    moved[peer.name] = peer.round, self._swarm.now_s()
                if self._swarm.now_s() - max(moved[peer.name][1], self._injector.last_s) > STUCK_S:
                    rounds = {each.name: each.round for each in self._swarm.trainers()}
                    text = f"{peer.name} makes no progress for {STUCK_S:g} s; rounds: {rounds}"
                    self._audit.violated(self._swarm.now_s(), "stuck", text)
                    return False
            for peer in self._swarm.peers.values():
                if peer.is_wanted and peer.process.poll() is not None:
                    text = f"{peer.name} ended with code {peer.process.returncode}: {last_line(peer.folder / 'log.txt')}"
                    self._audit.violated(self._swarm.now_s(), "error", text)
                    return False
                if peer.is_wanted:
                    self._swarm.note_children(peer)
        return True

    def _read_histories(self) -> None:
        """Pass the events up to a moment ago to the audit, in order of time."""
        until, found = time.time() - SETTLED_S, list[tuple[float, Process, Entry]]()
        for peer in self._swarm.peers.values():
            path = peer.folder / HISTORY_FILE
            if not path.exists():
                continue
            entries = read_history(path)
            fresh = [entry for entry in entries[peer.read :] if entry.time <= until]
            peer.read += len(fresh)
            found += [(entry.time, peer, entry) for entry in fresh]
        for at, peer, entry in sorted(found, key=lambda item: item[0]):
            self._observed(self._swarm.now_s(at), peer, entry)

    def _observed(self, at_s: float, peer: Process, entry: Entry) -> None:
        event, before = entry.event, self._audit.newest_round
        if peer.peer_id in self._audit.liars:
            return
        self._audit.observed(at_s, peer.peer_id, event)
        if isinstance(event, RoundCommitted):
            self._audit.num_experts = len(event.owners)
            self._bases.append(Held(at_s, peer.name, event.round, event.base_digest))
            peer.round = event.round
            self._tokens[event.round] = event.total_tokens
        if isinstance(event, Evaluated):
            self._losses[event.round] = event.validation_loss
        if self._audit.newest_round > before:
            self._done(min(self._audit.newest_round, self._scenario.rounds))
            self._injector.plan(self._audit.newest_round + 1)

"""A peer's memory of all rounds of its campaign: its own, and those before it came, as others tell of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from spes_p2p.errors import UserError
from spes_p2p.observe.events import Evaluated, Event, PhaseTrained, RoundCommitted, RoundFailed, sync_phases
from spes_p2p.observe.history import cut_torn_line
from spes_p2p.observe.plain import plain
from spes_p2p.observe.rounds import NOTHING, Contribution, RoundRecord, Totals, merged
from spes_p2p.observe.status import LONGEST_WORD

ROUNDS_FILE = "rounds.jsonl"


class Chronicle:
    """Observer that keeps a record of each committed round and who contributed what, in `rounds.jsonl` of the run-dir."""

    def __init__(self, peer_id: str, run_dir: Path, wall_time: Callable[[], float] = time.time):
        """Goes on from the file; lines that cannot be read are left out. Raises UserError when it cannot be written."""
        self._peer_id = peer_id
        self._wall_time = wall_time
        self._train_seconds = 0.0
        self._failed_attempts = 0
        path = run_dir / ROUNDS_FILE
        try:
            cut_torn_line(path)
            self._records, self._totals = read_rounds(run_dir)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --run-dir") from None

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()

    @property
    def records(self) -> tuple[RoundRecord, ...]:
        """All that are known, by round."""
        return tuple(self._records[number] for number in sorted(self._records))

    @property
    def totals(self) -> Totals:
        """Contributions of all rounds up to the last one before which this peer missed none."""
        return self._totals

    @property
    def newest(self) -> int:
        """Last round that is known; -1 before there is one."""
        return max(self._records, default=-1)

    def missing(self, rounds: Iterable[int]) -> list[int]:
        """Of these rounds, those of which nothing is known."""
        return [number for number in rounds if number not in self._records]

    def after(self, round_number: int, at_most: int) -> tuple[RoundRecord, ...]:
        """The first records after that round."""
        later = sorted(number for number in self._records if number > round_number)
        return tuple(self._records[number] for number in later[:at_most])

    def tell(self, event: Event) -> None:
        """Take note of the event."""
        match event:
            case PhaseTrained():
                self._train_seconds = event.seconds
            case RoundFailed():
                self._failed_attempts += 1
            case RoundCommitted():
                self._committed(event)
            case Evaluated() if event.round in self._records:
                if self._records[event.round].validation_loss != event.validation_loss:
                    self._keep(replace(self._records[event.round], validation_loss=event.validation_loss))

    def hear(self, records: Iterable[RoundRecord], totals: Totals) -> None:
        """Take up what another peer tells; what is known already stays, except for losses that were not."""
        for record in records:
            known = self._records.get(record.round)
            better = merged(known, record)
            if better is not known:
                self._keep(better)
        if totals.round > self._totals.round:
            self._keep_totals(totals)

    def _committed(self, event: RoundCommitted) -> None:
        trained = (("train", self._train_seconds),) if self._train_seconds else ()
        own = RoundRecord(
            round=event.round,
            campaign_step=event.campaign_step,
            tokens=event.tokens,
            total_tokens=event.total_tokens,
            loss=event.loss,
            validation_loss=math.nan,
            learning_rate=event.learning_rate,
            merge_alpha=event.merge_alpha,
            members=len(event.members),
            base_digest=event.base_digest,
            dropped_parts=event.dropped_parts,
            teller=self._peer_id,
            time=self._wall_time(),
            seconds=trained + tuple(sync_phases(event.seconds).items()),
            sent_bytes=event.sent_bytes,
            received_bytes=event.received_bytes,
            failed_attempts=self._failed_attempts,
            control=event.control[:LONGEST_WORD],
        )
        self._keep(own)
        self._train_seconds, self._failed_attempts = 0.0, 0
        if self._totals.tokens == event.total_tokens - event.tokens:
            self._keep_totals(self._totals.plus(event.round, tuple(Contribution(*each) for each in event.contributions)))

    def _keep(self, record: RoundRecord) -> None:
        self._records[record.round] = record
        self._write(plain(record))

    def _keep_totals(self, totals: Totals) -> None:
        self._totals = totals
        self._write({"totals": plain(totals)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()


def read_rounds(run_dir: Path) -> tuple[dict[int, RoundRecord], Totals]:
    """What a peer's run-dir tells of the rounds, by round, and the contributions; nothing where there is no file.

    A line of another version is left out: others can tell it again. Raises OSError.
    """
    records: dict[int, RoundRecord] = {}
    totals, path = NOTHING, run_dir / ROUNDS_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
            if "totals" in found:
                totals = _TOTALS.validate_python(found["totals"])
            else:
                record = _RECORD.validate_python(_with_nan(found))
                records[record.round] = record
        except (ValueError, KeyError, TypeError, ValidationError):
            continue
    return records, totals


def _with_nan(found: dict[str, Any]) -> dict[str, Any]:
    """JSON has null where a loss is not known."""
    return {name: math.nan if value is None and name in ("loss", "validation_loss") else value for name, value in found.items()}


_RECORD = TypeAdapter(RoundRecord)
_TOTALS = TypeAdapter(Totals)

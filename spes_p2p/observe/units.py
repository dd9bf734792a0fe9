"""Human-readable numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = "-"


def human_count(number: float) -> str:
    """1234567 -> '1.23M'; NaN -> '-'."""
    if not math.isfinite(number):
        return UNKNOWN
    for power, suffix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 0.9995 * 10**power:
            return f"{_three_digits(number / 10**power)}{suffix}"
    return _three_digits(number) if number % 1 else f"{number:.0f}"


def counted(count: int, noun: str) -> str:
    """(1, 'peer') -> '1 peer', (2, 'peer') -> '2 peers'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def human_scores(scores: Iterable[tuple[str, str, float, float]]) -> str:
    """(('piqa', 'acc', 0.5, 0.025),) -> 'piqa acc 0.500 ± 0.025'; an unknown error is left out."""
    return ", ".join(
        f"{task} {metric} {value:.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")
        for task, metric, value, error in scores
    )


def human_rate(tokens_per_second: float) -> str:
    """1234.5 -> '1.23k tokens/s'."""
    return f"{human_count(tokens_per_second)} tokens/s"


def human_bytes(size: float) -> str:
    """1234567 -> '1.23 MB' (decimal units); NaN -> '-'."""
    if not math.isfinite(size):
        return UNKNOWN
    for power, suffix in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if abs(size) >= 0.9995 * 10**power:
            return f"{_three_digits(size / 10**power)} {suffix}"
    return f"{size:.0f} B"


def human_memory(size: int) -> str:
    """As `human_bytes`, but a whole number of MiB or GiB in this unit: 25769803776 -> '24 GiB', for what a person typed."""
    for power, suffix in ((30, "GiB"), (20, "MiB")):
        if size % 2**power == 0 and 0 < size >> power < 10_000:
            return f"{size >> power} {suffix}"
    return human_bytes(size)


def human_bytes_up(size: int) -> str:
    """1234567 -> '1.24 MB': as `human_bytes`, but never less than the size, for what has to suffice."""
    step = 10 ** max(0, len(str(size)) - 3)
    return human_bytes(-(-size // step) * step)


def human_seconds(seconds: float) -> str:
    """0.42 -> '0.42 s', 75 -> '1m15s', 7500 -> '2h05m', 200000 -> '2d07h'; NaN -> '-'."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def time_left(seconds: float) -> str:
    """75 -> '1m15s left'; NaN -> ''."""
    return f"{human_seconds(seconds)} left" if math.isfinite(seconds) else ""


def human_loss(loss: float) -> str:
    """Three decimals; NaN -> '-'."""
    return f"{loss:.3f}" if math.isfinite(loss) else UNKNOWN


def percent(done: int, total: int) -> str:
    """(7, 11) -> '63 %'."""
    return f"{100 * done // max(1, total)} %"


def human_indices(indices: Iterable[int]) -> str:
    """(0, 1, 2, 3, 7) -> '0-3 7'; none -> '-'."""
    runs: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or UNKNOWN


def short_peer(peer_id: str) -> str:
    """Return the last six characters; peer ids share their prefix."""
    return peer_id[-6:]


def _three_digits(number: float) -> str:
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"

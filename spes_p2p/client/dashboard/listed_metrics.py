"""Prometheus metrics of a directory: of each campaign what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from spes_p2p.client.dashboard.listed import Listed, Seen

FIGURES: dict[str, tuple[str, Callable[[Seen], float]]] = {
    "spes_listed_round": ("Last committed round.", lambda seen: seen.round),
    "spes_listed_planned_rounds": ("Rounds of the whole campaign.", lambda seen: seen.total_rounds),
    "spes_listed_tokens": ("Tokens in the base.", lambda seen: seen.total_tokens),
    "spes_listed_tokens_per_second": ("Training speed of all trainers together.", lambda seen: seen.tokens_per_second),
    "spes_listed_validation_loss": ("Held-out loss, nats per token; NaN before the first.", lambda seen: seen.validation_loss),
    "spes_listed_trainers": ("Living trainers.", lambda seen: seen.trainers),
    "spes_listed_helpers": ("Living helpers.", lambda seen: seen.helpers),
}


class ListedCollector:
    """Metrics of the campaigns at the time of a scrape; `address`: the one that the directory was given first."""

    def __init__(self, listed: Sequence[Listed]):
        self._listed = listed

    def collect(self) -> Iterator[Metric]:
        """Yield whether each campaign answers, and what those that answer say of themselves."""
        up = GaugeMetricFamily("spes_listed_up", "1 if peers of the campaign answer, otherwise 0.", labels=["address"])
        names = InfoMetricFamily("spes_listed", "Name, config hash and state of the campaign.", labels=["address"])
        figures = {name: GaugeMetricFamily(name, about, labels=["address"]) for name, (about, _) in FIGURES.items()}
        for each in self._listed:
            address, seen = [each.addresses[0]], each.seen
            up.add_metric(address, each.answers)
            if not each.answers or seen is None:
                continue
            names.add_metric(address, {"campaign": seen.campaign, "campaign_hash": seen.campaign_hash, "state": seen.state})
            for name, figure in figures.items():
                figure.add_metric(address, FIGURES[name][1](seen))
        yield from (up, names, *figures.values())

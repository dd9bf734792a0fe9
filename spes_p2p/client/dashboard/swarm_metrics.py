"""Prometheus metrics of a dashboard: what one peer alone does not know of its swarm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spes_p2p.client.alerts import KINDS
from spes_p2p.client.dashboard.poll import Published

MAX_SERIES = 256
"""Peers, and teams, with most tokens that get a series each: a campaign may see any number of them come and go."""
NAMES = ("spes_alert", "spes_webhook_refusals_total", "spes_webhook_waiting", "spes_peer_tokens", "spes_team_tokens")


class SwarmCollector:
    """Metrics of what is published at the time of a scrape."""

    def __init__(self, published: Published):
        self._published = published

    def collect(self) -> Iterator[Metric]:
        """Yield the alerts, how the webhook does, and who has trained how much."""
        published, swarm = self._published, self._published.view or {}
        alert = GaugeMetricFamily(
            "spes_alert", "1 while the dashboard shows an alert of this kind, otherwise 0.", labels=["kind"])
        present = {each.kind for each in published.alerts}
        for kind in KINDS:
            alert.add_metric([kind], kind in present)
        yield alert
        yield CounterMetricFamily(
            "spes_webhook_refusals", "Posts that the URL of --webhook did not take; each is tried again.",
            value=published.webhook_refusals)
        yield GaugeMetricFamily(
            "spes_webhook_waiting", "Notices that wait until the URL of --webhook takes them.", value=published.webhook_waiting)
        peers = GaugeMetricFamily(
            "spes_peer_tokens", f"Tokens of a peer in the base, of the {MAX_SERIES} peers with most.", labels=["peer", "name"])
        every: list[dict[str, Any]] = [*swarm.get("peers", ()), *swarm.get("gone", ())]
        for each in sorted(every, key=lambda peer: -peer["tokens"])[:MAX_SERIES]:
            if each["tokens"]:
                peers.add_metric([each["peer_id"], each["name"]], each["tokens"])
        yield peers
        teams = GaugeMetricFamily(
            "spes_team_tokens", f"Tokens of a team's peers in the base, of the {MAX_SERIES} teams with most.", labels=["team"])
        for team, _, tokens in swarm.get("teams", ())[:MAX_SERIES]:
            teams.add_metric([team], tokens)
        yield teams

"""What `bootstrap/` gives an owner to watch a campaign with: its alert rules and the queries of its dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BOOTSTRAP = ROOT / "bootstrap"
DASHBOARD = BOOTSTRAP / "grafana/spes_p2p.json"
ALERTS = BOOTSTRAP / "alerts.yml"


def dashboard_queries() -> dict[str, str]:
    """PromQL of every panel by its title, as Grafana wrote it."""
    dashboard = json.loads(DASHBOARD.read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    }


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

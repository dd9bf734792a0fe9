"""An open campaign, its genesis, commits and announcements to plan from, and a swarm without audits: for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spes_p2p.messages.admission import Invitation, Role
from spes_p2p.messages.consensus import Workload
from spes_p2p.messages.rounds import Announcement
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.testing.simulate.swarm import EXPERTS, VirtualSwarm, campaign

OPEN = campaign(admission="open")
GENESIS = VirtualSwarm(OPEN).genesis
PHASE_TOKENS = 10 * 2 * 16
RECENT = [replace(
    GENESIS, round=0, plan="p", members=tuple("AX"), owners=((0, 1),) * EXPERTS,
    workloads=(Workload(10, ()), Workload(40, ())),
)]
"""After a commit that gave A a phase of the usual length, and X one four times as long."""
MATRICES = {"gate_up_proj": (16, 8), "down_proj": (8, 8)}
WIDE = Layout([
    TensorSpec("embed", (125_000, 8), "shared"), TensorSpec("gate", (EXPERTS, 8), "router", 0),
    *(TensorSpec(f"experts.{e}.{name}", shape, "expert", 0, e) for e in range(EXPERTS) for name, shape in MATRICES.items()),
])
"""With a large shared matrix."""
ELECTOR: tuple[Role, ...] = ("trainer", "elector")


def announce(tokens: int = 0, invitation: Invitation | None = None, **changes: Any) -> Announcement:
    """Of a trainer that can train all experts."""
    made = Announcement(
        OPEN.hash, 10, 0, 0, 0.0, GENESIS.id, "d", tokens, (tokens,) * EXPERTS, EXPERTS, 1.0, 1.0, 0.0, None, (),
        invitation=invitation,
    )
    return replace(made, **changes)


def unaudited_swarm(
    vouched: str, strangers: str, min_peers: int | None = None, reform_after_s: float = 60.0, **options: Any
) -> VirtualSwarm:
    """A swarm with a bootstrap peer, without audits, in which these have yet to start. `min_peers`: by default all of them."""
    count = len(vouched + strangers) if min_peers is None else min_peers
    sync = {"min_peers": count, "audited_share": 0.0, "reform_after_s": reform_after_s}
    swarm = VirtualSwarm(campaign(total_steps=10**6, admission="open", sync=sync), **options)
    for name in vouched:
        swarm.invitations[name] = swarm.invitation(name, ("trainer", "elector"))
    swarm.start_bootstrap()
    return swarm

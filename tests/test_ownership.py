"""Who trains which expert: all are owned, loads are even, no peer is overburdened, and little moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.rounds.ownership import Owners, assign_experts, guard_experts

CAPACITIES = st.dictionaries(st.sampled_from("ABCDEFGH"), st.integers(0, 12), max_size=8)
EXPERTS = st.integers(1, 16)
REDUNDANCY = st.integers(1, 3)
TRUSTED = st.sets(st.sampled_from("ABCDEFGH"))


def loads(owners: Owners, peers: object) -> dict[str, int]:
    return {peer: sum(peer in its for its in owners) for peer in peers}  # type: ignore[attr-defined]


@given(EXPERTS, CAPACITIES, REDUNDANCY, st.data())
def test_every_expert_is_owned_while_there_is_capacity(
    experts: int, capacities: dict[str, int], redundancy: int, data: st.DataObject
) -> None:
    before = st.lists(st.sampled_from("ABCDEFGHXY"), unique=True, max_size=3)
    last = data.draw(st.lists(before, min_size=experts, max_size=experts))
    owners = assign_experts(experts, capacities, last, redundancy, "salt")
    room = {peer: min(capacity, experts) for peer, capacity in capacities.items() if capacity > 0}
    load = loads(owners, capacities)
    assert len(owners) == experts
    assert all(load[peer] <= capacities[peer] for peer in capacities)
    assert all(len(its) <= min(redundancy, max(1, len(room))) and its == tuple(sorted(set(its))) for its in owners)
    if sum(room.values()) >= experts:
        assert all(owners)
    else:
        assert sum(map(len, owners)) == sum(room.values())
    copies = min(redundancy, len(room))
    if sum(room.values()) >= experts * copies:
        assert all(len(its) == copies for its in owners)


@given(EXPERTS, CAPACITIES, REDUNDANCY)
def test_loads_differ_by_at_most_one_where_capacities_allow(experts: int, capacities: dict[str, int], redundancy: int) -> None:
    owners = assign_experts(experts, capacities, [()] * experts, redundancy, "salt")
    load = loads(owners, [peer for peer in capacities if capacities[peer] > 0])
    for peer, count in load.items():
        if count < min(capacities[peer], experts):
            assert max(load.values()) <= count + 1


@given(EXPERTS, st.sets(st.sampled_from("ABCDEFGH"), min_size=1), REDUNDANCY)
def test_nothing_moves_while_nobody_comes_or_goes(experts: int, peers: set[str], redundancy: int) -> None:
    capacities = dict.fromkeys(peers, experts)
    first = assign_experts(experts, capacities, [()] * experts, redundancy, "salt")
    assert assign_experts(experts, capacities, first, redundancy, "salt") == first


@given(EXPERTS, st.sets(st.sampled_from("ABCDEFG"), min_size=1))
def test_a_joiner_takes_its_even_share_and_nothing_else_moves(experts: int, peers: set[str]) -> None:
    before = assign_experts(experts, dict.fromkeys(peers, experts), [()] * experts, 1, "salt")
    after = assign_experts(experts, dict.fromkeys(peers | {"J"}, experts), before, 1, "salt")
    moved = [expert for expert in range(experts) if before[expert] != after[expert]]
    assert all(after[expert] == ("J",) for expert in moved)
    assert len(moved) <= -(-experts // (len(peers) + 1))


@given(EXPERTS, st.sets(st.sampled_from("ABCDEFG"), min_size=2))
def test_when_a_peer_goes_only_its_experts_move(experts: int, peers: set[str]) -> None:
    before = assign_experts(experts, dict.fromkeys(peers, experts), [()] * experts, 1, "salt")
    gone = min(peers)
    after = assign_experts(experts, dict.fromkeys(peers - {gone}, experts), before, 1, "salt")
    assert all(after[expert] == before[expert] for expert in range(experts) if before[expert] != (gone,))


def guarded(
    experts: int, capacities: dict[str, int], last: list[list[str]], redundancy: int, vouched: set[str], proven: set[str]
) -> Owners:
    owners = assign_experts(experts, capacities, last, redundancy, "salt")
    return guard_experts(owners, capacities, last, redundancy, vouched, proven)


@given(EXPERTS, CAPACITIES, st.integers(2, 3), TRUSTED, TRUSTED, st.data())
def test_where_not_all_are_trusted_every_owned_expert_has_a_trusted_owner(
    experts: int, capacities: dict[str, int], redundancy: int, vouched: set[str], proven: set[str], data: st.DataObject
) -> None:
    trusted = vouched | proven
    before = st.lists(st.sampled_from("ABCDEFGHXY"), unique=True, max_size=3)
    last = data.draw(st.lists(before, min_size=experts, max_size=experts))
    owners = guarded(experts, capacities, last, redundancy, vouched, proven)
    load = loads(owners, capacities)
    assert all(not its or trusted & set(its) for its in owners)
    assert all(load[peer] <= capacities[peer] for peer in capacities)
    assert all(len(its) <= redundancy for its in owners)
    room, vouched_room = (
        sum(min(capacities[peer], experts) for peer in peers & capacities.keys()) for peers in (trusted, vouched)
    )
    assert sum(map(bool, owners)) == min(experts, room), "as many are owned as trusted peers have room for"
    assert sum(bool(vouched & set(its)) for its in owners) >= min(experts, vouched_room)
    if sum(capacity >= experts for capacity in capacities.values()) >= 2 and room >= experts:
        assert all(len(its) >= 2 for its in owners)


@given(EXPERTS, st.sets(st.sampled_from("ABCDEFGH"), min_size=1), TRUSTED, TRUSTED)
def test_where_not_all_are_trusted_experts_soon_stay_in_place(
    experts: int, peers: set[str], vouched: set[str], proven: set[str]
) -> None:
    owners: Owners = ((),) * experts
    history = [
        owners := guarded(experts, dict.fromkeys(peers, experts), list(map(list, owners)), 2, vouched, proven)
        for _ in range(8)
    ]
    assert history[-1] == history[-2]


def test_another_campaign_favours_other_peers() -> None:
    first = {assign_experts(1, dict.fromkeys("ABCD", 1), [()], 1, str(salt))[0] for salt in range(20)}
    assert len(first) > 1

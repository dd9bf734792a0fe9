"""./tools/bench link: rounds over shaped lines, each peer in its own network namespace (tc tbf; needs root).

`overlap`: two peers and a bootstrap peer; tokens per second of a peer without rounds, of peers whose rounds block training, and
of peers whose rounds overlap with it. `even`: four identical peers. `uneven`: one of four has a fifth of the bandwidth, and
each direction has 50 ms of latency (added by the transport, since not every kernel has netem). These two measure how much of
its line the busiest peer used between plan and staged results: encoded bytes without headers, a few per cent less than the line
carried.

`regions`: two sites of eight peers with a slow line between. It counts the bytes that cross the line each way in each round, on
the wire, beside one copy of what must cross: the mean of the shared weights, and the experts that this side trains.

`across`: the simulated swarm of `regions`, which needs no root: what crosses the line in each round, by what it is for.

`predicted`: 24 peers, a third of them on each of three lines, and the same swarm in the simulator: its round time beside
theirs. `tcp` is the kernel's congestion control, on which that depends. Another one: sysctl -w
net.ipv4.tcp_congestion_control=cubic

`whole`: the simulated swarm of `predicted` alone, which needs no root: what a round takes beyond its phase, relative to the
least that its lines permit.

Trainers take a fixed time per phase and no CPU, as on a GPU. Means over each peer's measured rounds, medians of the peers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_json import parser_of, tell
from round_benchmark import Process, started
from round_contenders import EXPERTS, Report, our_campaign, our_layout, tensor_sizes

from spes_p2p.observe.events import Event, RoundCommitted
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.namespaces import Namespaces, why_unavailable
from spes_p2p.testing.simulate.swarm import Recorder, VirtualSwarm
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.testing.virtual_loop import run_virtual

PROGRAM = Path(__file__).with_name("link_member.py")
CASES = ("overlap", "even", "uneven", "regions", "across", "predicted", "whole")
PAYLOAD = 1448 / 1514
"""Share of a line that TCP leaves to what it carries: of an Ethernet frame, without headers and time stamps. The simulator's
network has none."""
UNEVEN_SHARE, UNEVEN_LATENCY_S = 0.2, 0.05
DEMOTIONS = ("lost", "disputed")
"""Why members reduce nothing for three rounds."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds of each contender (default 6)")
    parser.add_argument("--codec", default="int8", help="codec of shared weights and experts (default int8)")
    parser.add_argument("--megabytes", type=int, default=20, help="fp32 state in `overlap` (default 20)")
    parser.add_argument("--mbit", type=float, default=20.0, help="bandwidth in `overlap` (default 20)")
    parser.add_argument("--phase", type=float, default=6.0, help="seconds per phase in `overlap` (default 6)")
    parser.add_argument("--line-megabytes", type=int, default=200, help="fp32 state in the other cases (default 200)")
    parser.add_argument("--line-mbit", type=float, default=100.0, help="bandwidth in the other cases (default 100)")
    parser.add_argument("--region-megabytes", type=int, default=60, help="fp32 state in `regions` (default 60)")
    parser.add_argument("--region-mbit", type=float, nargs=2, default=(100.0, 5.0), metavar=("INSIDE", "BETWEEN"),
                        help="bandwidth of each peer and of the line between the sites in `regions` (default 100 5)")
    parser.add_argument("--region-peers", type=int, default=8, help="peers of each site in `regions` (default 8)")
    parser.add_argument("--predicted-megabytes", type=int, default=8, help="fp32 state in `predicted` (default 8)")
    parser.add_argument("--predicted-mbit", type=float, nargs="+", default=(4.0, 2.0, 1.0),
                        help="bandwidths in `predicted`, of as many peers each (default 4 2 1)")
    parser.add_argument("--predicted-peers", type=int, default=24, help="peers in `predicted` (default 24)")
    parser.add_argument("--predicted-phase", type=float, default=20.0, help="seconds per phase in `predicted` (default 20)")
    parser.add_argument("--whole-down", type=float, default=1.0, metavar="RATIO",
                        help="lines in `whole` receive this many times as fast as they send (default 1)")
    parser.add_argument("--fair", action="store_true",
                        help="lines share their bandwidth evenly among the peers at their other ends, as with fq_codel")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where run-dirs are made and removed")
    arguments = parser.parse_args()
    if not arguments.whole_down > 0:
        parser.error(f"--whole-down {arguments.whole_down}: must be above 0")
    why = why_unavailable()
    if why is not None and not {"across", "whole"}.issuperset(arguments.only):
        parser.error(why)
    report: Report = {}
    if "overlap" in arguments.only:
        report["overlap"] = overlap_case(arguments)
    for case in ("even", "uneven"):
        if case in arguments.only:
            report[case] = line_case(arguments, case == "uneven")
    if "regions" in arguments.only:
        report["regions"] = regions_case(arguments)
    if "across" in arguments.only:
        report["across"] = run_virtual(across_case(arguments))
    if "predicted" in arguments.only:
        report["predicted"] = predicted_case(arguments)
    if "whole" in arguments.only:
        report["whole"] = whole_case(arguments)
    tell(report, arguments.json)
    return 0


def overlap_case(arguments: argparse.Namespace) -> Report:
    """Measure the three kinds of peers one after the other."""
    shape = {"elements": arguments.megabytes * 10**6 // 4, "phase_s": arguments.phase, "owned": EXPERTS // 2}
    found = {}
    for kind in ("alone", "blocking", "overlap"):
        spec = {**shape, "codec": arguments.codec, "sync": {"min_peers": 2, "overlap": kind == "overlap"}, "latency_s": 0.0}
        lines = {"peer-0": arguments.mbit, "peer-1": arguments.mbit}
        rounds = run_alone(spec, arguments) if kind == "alone" else run(spec, lines, arguments)
        found[kind] = summary(rounds, lines, arguments.phase)
        print(f"{kind}: {found[kind]}", file=sys.stderr)
    never = found["alone"]["seconds_per_round"]
    return {
        **found, "megabytes": arguments.megabytes, "mbit": arguments.mbit, "phase_s": arguments.phase,
        "blocking_share_of_time": round(1 - never / found["blocking"]["seconds_per_round"], 3),
        "overlap_vs_never_tokens_per_s": round(never / found["overlap"]["seconds_per_round"], 3),
    }


def line_case(arguments: argparse.Namespace, uneven: bool) -> Report:
    """Measure how much of the lines an exchange uses."""
    lines = {f"peer-{i}": arguments.line_mbit for i in range(4)}
    if uneven:
        lines["peer-3"] *= UNEVEN_SHARE
    spec = {
        "elements": arguments.line_megabytes * 10**6 // 4, "phase_s": 0.5, "owned": EXPERTS // 4, "codec": arguments.codec,
        "sync": {"min_peers": 4}, "latency_s": UNEVEN_LATENCY_S if uneven else 0.0,
    }
    found = summary(run(spec, lines, arguments), lines, 0.5)
    print(f"{'uneven' if uneven else 'even'}: {found}", file=sys.stderr)
    return {**found, "megabytes": arguments.line_megabytes, "mbit": list(lines.values())}


def regions_case(arguments: argparse.Namespace) -> Report:
    """Measure what crosses the line between two sites in each round; in the first one nobody knows the lines."""
    inside, between = (1e6 / 8 * mbit for mbit in arguments.region_mbit)
    site = arguments.region_peers
    elements = arguments.region_megabytes * 10**6 // 4
    spec = {
        "elements": elements, "phase_s": 0.5, "owned": 1, "codec": arguments.codec,
        "sync": {"min_peers": 2 * site}, "latency_s": 0.0,
    }
    codec = CODECS[arguments.codec]
    shared, expert = (codec.encoded_bytes(size) for size in tensor_sizes(elements))
    names, machines, rounds = [f"peer-{i}" for i in range(2 * site)], Namespaces(arguments.fair), list[Report]()
    try:
        for name in ("bootstrap", *names):
            machines.add(name, inside)
        machines.partition(names[site:])
        machines.join_sides(between)
        with starting(arguments.folder) as start:
            found = start("bootstrap", 0, **machine(machines, "bootstrap"), **spec).next_report()
            known = {"addresses": [found["address"]], "genesis": found["genesis"], **spec}
            members = [start("ours", i, **machine(machines, name), **known) for i, name in enumerate(names)]
            first = [member.next_report() for member in members]
            sides = [{report["peer"] for report in first[:site]}, {report["peer"] for report in first[site:]}]
            owners, crossed = first[0]["owners"], machines.crossed_bytes()
            for report in reports_until(members[0], arguments.rounds):
                copies = [shared + expert * sum(not side.isdisjoint(its) for its in owners) for side in sides]
                before, owners, crossed = crossed, report["owners"], machines.crossed_bytes()
                each = {"round": report["round"], "seconds": round(sum(report["phases"].values()), 1),
                        "crossed_megabytes": [round((now - then) / 1e6, 2) for now, then in zip(crossed, before, strict=True)],
                        "one_copy_megabytes": [round(copy / 1e6, 2) for copy in copies], "dropped_parts": report["dropped"],
                        **{why: len(report[why]) for why in DEMOTIONS}}
                rounds.append(each)
                print(each, file=sys.stderr)
    finally:
        machines.close()
    return {"mbit": arguments.region_mbit, "megabytes": arguments.region_megabytes, "rounds": rounds}


async def across_case(arguments: argparse.Namespace) -> Report:
    """Simulate two sites; tell which methods' bytes cross the line between them, and how many copies of what must cross."""
    inside, between = (1e6 / 8 * mbit for mbit in arguments.region_mbit)
    names = [f"peer-{i}" for i in range(2 * arguments.region_peers)]
    here, there = names[: arguments.region_peers], names[arguments.region_peers :]
    elements = arguments.region_megabytes * 10**6 // 4
    spec = {"elements": elements, "phase_s": 20.0, "owned": 1, "codec": arguments.codec, "sync": {"min_peers": len(names)}}
    shared, expert = (CODECS[arguments.codec].encoded_bytes(size) for size in tensor_sizes(elements))
    network, crossed, rounds = MemoryNetwork(latency_s=0.005), Counter[tuple[str, str]](), list[Report]()
    network.share_line(there, between, between)
    for name in ("bootstrap", *names):
        network.set_bandwidth(name, inside, inside)

    def count(frame: Frame) -> Frame:
        if (frame.sender in there) != (frame.receiver in there):
            crossed["there" if frame.receiver in there else "here", frame.method] += len(frame.body)
        return frame

    def observer(name: str, recorder: Recorder) -> Any:
        def observe(event: Event) -> None:
            if isinstance(event, RoundCommitted) and name == here[0]:
                ways = {way: {method: round(size / 1e6, 3) for (to, method), size in crossed.most_common() if to == way}
                        for way in ("there", "here")}
                plan = swarm.peers[name].replica.base.plan
                assert plan is not None
                alone = [{m.peer for m in plan.members if m.routed[e]} for e in range(EXPERTS)]
                copies = {way: shared + expert * sum(not its.isdisjoint(side) for its in alone)
                          for way, side in (("there", here), ("here", there))}
                rounds.append({"round": event.round, "exchange_s": round(event.seconds["exchange"], 1), "megabytes_to": ways,
                               "copies_to": {way: round(1e6 * sum(ways[way].values()) / copies[way], 3) for way in ways}})
                print(rounds[-1], file=sys.stderr)
                crossed.clear()
        return observe

    network.tap = count
    swarm = virtual_swarm(spec, network, observer)
    swarm.start_bootstrap()
    for name in names:
        swarm.start(name, experts=spec["owned"])
    await swarm.until(lambda: len(rounds) > arguments.rounds, 10_000.0)
    return {"mbit": arguments.region_mbit, "megabytes": arguments.region_megabytes, "rounds": rounds}


def predicted_case(arguments: argparse.Namespace) -> Report:
    """Measure the rounds of peers on shaped lines, and those that the simulator predicts for them."""
    (spec, lines), phase_s, found = predicted_swarm(arguments), arguments.predicted_phase, {}
    predicted = run_virtual(simulated(spec, lines, arguments.rounds))
    for kind, rounds in (("predicted", predicted), ("real", run(spec, lines, arguments))):
        found[kind] = summary(rounds, lines, phase_s)
        print(f"{kind}: {found[kind]}", file=sys.stderr)
    ratios = {of: round(found["real"][of] / found["predicted"][of], 3) for of in ("seconds_per_round", "round_without_phase_s")}
    tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    about = {"mbit": arguments.predicted_mbit, "megabytes": arguments.predicted_megabytes, "tcp": tcp}
    return {**found, "real_over_predicted": ratios, **about}


def predicted_swarm(arguments: argparse.Namespace) -> tuple[Report, dict[str, float]]:
    """Return the swarm of `predicted`, and its members' lines in Mbit/s."""
    speeds, count = arguments.predicted_mbit, arguments.predicted_peers
    spec = {
        "elements": arguments.predicted_megabytes * 10**6 // 4, "phase_s": arguments.predicted_phase, "owned": 1,
        "codec": arguments.codec, "sync": {"min_peers": count}, "latency_s": UNEVEN_LATENCY_S,
    }
    return spec, {f"peer-{i}": speeds[i % len(speeds)] for i in range(count)}


def whole_case(arguments: argparse.Namespace) -> Report:
    """Simulate rounds; compare them with the time that any assignment of reducers takes at least.

    Each member must receive a result of all shared weights and experts, over its own line. Together they send at least an
    update and a result of the shared weights for each, and each expert to all.
    """
    spec, lines = predicted_swarm(arguments)
    shared, expert = (CODECS[arguments.codec].encoded_bytes(size) for size in tensor_sizes(spec["elements"]))
    rates = [PAYLOAD * 1e6 / 8 * mbit for mbit in lines.values()]
    received, sent = shared + EXPERTS * expert, (2 * shared + EXPERTS * expert) * (len(lines) - 1)
    least_s = max(received / (arguments.whole_down * min(rates)), sent / sum(rates))
    rounds = run_virtual(simulated(spec, lines, arguments.rounds, arguments.whole_down))
    found = summary(rounds, lines, arguments.predicted_phase, arguments.whole_down)
    beyond_s = found["round_without_phase_s"]
    about = {"peers": len(lines), "mbit": arguments.predicted_mbit, "megabytes": arguments.predicted_megabytes,
             "down": arguments.whole_down}
    return {**found, "least_s": round(least_s, 3), "over_least": round(beyond_s / least_s, 3), **about}


async def simulated(spec: Report, lines: Mapping[str, float], rounds: int, down: float = 1.0) -> dict[str, list[Report]]:
    """Return what `run` does, of the same swarm in the simulator. Lines receive `down` times as fast as they send."""
    network, heard = MemoryNetwork(latency_s=spec["latency_s"]), {name: list[Report]() for name in lines}
    for name, mbit in {"bootstrap": max(lines.values()), **lines}.items():
        network.set_bandwidth(name, PAYLOAD * 1e6 / 8 * mbit, down * PAYLOAD * 1e6 / 8 * mbit)
    clock = asyncio.get_running_loop().time

    def observer(name: str, recorder: Recorder) -> Any:
        def observe(event: Event) -> None:
            if isinstance(event, RoundCommitted) and name in heard and event.round >= WARM_UP:
                heard[name].append({
                    "round": event.round, "at": clock(), "cpu_seconds": 0.0, "digest": event.base_digest,
                    "sent": event.sent_bytes, "received": event.received_bytes, "phases": event.seconds,
                    "dropped": event.dropped_parts, "lost": event.lost, "disputed": event.disputed,
                })
        return observe

    swarm = virtual_swarm(spec, network, observer)
    swarm.start_bootstrap()
    for count, name in enumerate(lines, start=1):
        swarm.start(name, experts=spec["owned"])
        if count & (count - 1) == 0:  # by twos: hundreds that ask one donor at once cost minutes of CPU time
            await swarm.until(lambda: min(swarm.rounds().values()) >= -1)
    await swarm.until(lambda: all(len(reports) > rounds for reports in heard.values()), 10_000.0)
    return {name: reports[: rounds + 1] for name, reports in heard.items()}


def virtual_swarm(spec: Report, network: MemoryNetwork, observer: Callable[[str, Recorder], Any]) -> VirtualSwarm:
    campaign, layout = our_campaign(spec), our_layout(spec["elements"])
    tokens = campaign.config.training.batch_size * campaign.config.training.sequence_length
    return VirtualSwarm(
        campaign, seconds_per_step=spec["phase_s"], network=network, bootstrap="bootstrap", make_observer=observer,
        layout=layout,
        make_trainer=lambda base, owned: SyntheticTrainer(layout, base, owned, tokens, spec["phase_s"], 0),
    )


WARM_UP = 5
"""Rounds until bandwidths are measured and files are reused."""


def run(spec: Report, lines: Mapping[str, float], arguments: argparse.Namespace) -> dict[str, list[Report]]:
    """Run a swarm; return the reports of the measured rounds by peer, and of the round before them."""
    machines = Namespaces(arguments.fair)
    try:
        for name in ("bootstrap", *lines):
            machines.add(name, 1e6 / 8 * lines.get(name, max(lines.values())))
        with starting(arguments.folder) as start:
            found = start("bootstrap", 0, **machine(machines, "bootstrap"), **spec).next_report()
            known = {"addresses": [found["address"]], "genesis": found["genesis"], **spec}
            members = {name: start("ours", i, **machine(machines, name), **known) for i, name in enumerate(lines)}
            last = WARM_UP + arguments.rounds
            heard = {name: list(reports_until(member, last)) for name, member in members.items()}
        return {name: [report for report in reports if report["round"] >= WARM_UP] for name, reports in heard.items()}
    finally:
        machines.close()


def run_alone(spec: Report, arguments: argparse.Namespace) -> dict[str, list[Report]]:
    with starting(arguments.folder) as start:
        member = start("alone", 0, rounds=1 + arguments.rounds, **spec)
        return {"alone": list(reports_until(member, 1 + arguments.rounds))}


def reports_until(member: Process, last: int) -> Iterator[Report]:
    while True:
        report = member.next_report()
        yield report
        if report["round"] >= last:
            return


@contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts processes, in this folder; end them all."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as place, started(PROGRAM, Path(place)) as start:
        yield start


def machine(machines: Namespaces, name: str) -> Report:
    """Return with what a process is started in a namespace."""
    return {"before": machines.command(name), "address": machines.address(name)}


def summary(rounds: Mapping[str, list[Report]], lines: Mapping[str, float], phase_s: float, down: float = 1.0) -> Report:
    """Return means over each peer's rounds, medians over the peers, and the busiest line."""
    per_round = {name: (last["at"] - first["at"]) / (last["round"] - first["round"])
                 for name, (first, *_, last) in rounds.items()}
    found: Report = {
        "seconds_per_round": round(statistics.median(per_round.values()), 3),
        "cpu_seconds_per_round": round(statistics.median(
            (last["cpu_seconds"] - first["cpu_seconds"]) / (last["round"] - first["round"])
            for first, *_, last in rounds.values()), 3),
    }
    if "alone" in rounds:
        return found
    exchanged = {name: [report for report in reports[1:] if "exchange" in report["phases"]] for name, reports in rounds.items()}
    measured = [report for reports in exchanged.values() for report in reports]
    last = [reports[-1] for reports in rounds.values()]
    ways = {"sent": 1.0, "received": down}
    shares = {name: {way: share_of_line(reports, way, lines[name] * times) for way, times in ways.items()}
              for name, reports in exchanged.items() if reports}
    return {
        **found,
        "round_without_phase_s": round(found["seconds_per_round"] - phase_s, 3),
        "exchange_s": round(statistics.median(r["phases"]["exchange"] for r in measured), 3),
        "apply_s": round(statistics.median(r["phases"]["apply"] for r in measured), 3),
        "megabytes_sent": [round(r["sent"] / 1e6, 2) for r in last],
        "megabytes_received": [round(r["received"] / 1e6, 2) for r in last],
        "share_of_line": shares,
        "share_of_fullest_line": max(share for ways in shares.values() for share in ways.values()),
        "replicas_identical": len({r["digest"] for r in last}) == 1,
        "left_out": sum(len(reports) - 1 for reports in rounds.values()) - len(measured),
        "dropped_parts": sum(r["dropped"] for r in measured),
        **{why: len({(r["round"], peer) for r in measured for peer in r[why]}) for why in DEMOTIONS},
    }


def share_of_line(reports: list[Report], way: str, mbit: float) -> float:
    """Return the used share of a line's capacity during the exchange, median over the rounds."""
    shares: list[float] = [8e-6 * r[way] / r["phases"]["exchange"] / mbit for r in reports]
    return round(statistics.median(shares), 3)


if __name__ == "__main__":
    sys.exit(main())

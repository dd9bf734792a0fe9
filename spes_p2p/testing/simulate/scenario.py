"""Scenarios: peers with their machines and links, number of rounds, scripted faults, and the rate of random ones.

A scenario comes from a YAML file, the command's options, or both. An error is one line with file, line, field, value and the
valid values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from spes_p2p.config.problems import broken_rule, validated
from spes_p2p.config.quantities import parse_bits_per_second
from spes_p2p.config.section import Section
from spes_p2p.config.types import Count, Fraction, NonNegative, Positive, PositiveNumber, Text, checked
from spes_p2p.config.yaml_file import YamlFile, read_yaml_mapping
from spes_p2p.errors import UserError
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.testing.attacks.kinds import ATTACKS, AttackKind
from spes_p2p.testing.attacks.kinds import KINDS as ATTACK_KINDS
from spes_p2p.testing.memory_nat import Nat
from spes_p2p.testing.simulate.faults import KINDS, Corruption, Fault, Kind
from spes_p2p.testing.simulate.points import IMMEDIATELY, known_point

BOOTSTRAP = "bootstrap"
WARM_ROUNDS = 2
"""Rounds after which the growth of memory counts: the first ones load libraries."""
AUDITED_SHARE = 0.5
"""Default of `audited_share`. Runs have too few rounds for that of campaigns."""
OPTIONS = {"kinds": "faults"}
"""Options whose names differ from their fields."""
DEFAULT_SECONDS = 10.0
"""Default duration of a scripted fault."""
DEFAULT_FAULT_RATE = 0.5
"""Default without a scenario file, attackers or churn."""
DEFAULT_ATTACKED_ROUNDS = 20
"""Default number of rounds with attackers: what the small model of these runs needs to learn its language."""
LATE_JOINER = "late"
"""With attackers, a new peer that joins after a third of the rounds: it believes nothing yet, and needs a base."""


def _point(name: str) -> str:
    try:
        return known_point(name)
    except ValueError as error:
        raise broken_rule(str(error)) from None


def _is_bandwidth(text: str) -> bool:
    try:
        return parse_bits_per_second(text, "bandwidth") > 0
    except UserError:
        return False


Bandwidth = Annotated[str, checked("must be a bandwidth such as 100mbit or 1gbit", _is_bandwidth)]
Point = Annotated[str, AfterValidator(_point)]


MAX_LOSS = 0.5


def _range(most: float) -> BeforeValidator:
    """Return a validator that takes a number for the range of this number alone."""

    def check(value: Any) -> Any:
        ends = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
        are_numbers = len(ends) == 2 and all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends)
        if not are_numbers or not 0 <= ends[0] <= ends[1] <= most:
            limit = f"from 0 to {most:g}" if most < math.inf else "of at least 0"
            raise broken_rule(f"must be a number {limit}, or two: [least, greatest]")
        return ends

    return BeforeValidator(check)


Loss = Annotated[float, Field(strict=True, ge=0, le=MAX_LOSS)]
Losses = Annotated[tuple[float, float], _range(MAX_LOSS)]
Latencies = Annotated[tuple[float, float], _range(math.inf)]


class MachineSettings(Section):
    """One peer's machine and link. Omitted values are those of the other peers, or the seed chooses them."""

    speed: PositiveNumber | None = Field(None, description="Training speed relative to step_s (virtual form).")
    experts: Positive | None = Field(None, description="Maximum number of experts to train.")
    bandwidth: Bandwidth | None = Field(None, description="Bandwidth of its link, each way: 100mbit.")
    upload: Bandwidth | None = Field(None, description="Bandwidth of its link's upload, if that is another (virtual form).")
    nat: Nat | None = Field(
        None, description="open: others can dial it. cone: one outside port, so two such peers connect by hole punching. "
        "symmetric: a port for each destination (virtual form).")
    loss: Loss | None = Field(None, description="Share of packets that its link loses, each way (virtual form).")
    latency_s: NonNegative | None = Field(None, description="One-way seconds to every other peer (real processes: from them).")

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Bandwidth each way."""
        return None if self.bandwidth is None else bytes_per_s(self.bandwidth)


class NatSettings(Section):
    """Shares of the trainers that are behind NATs of each kind; the others can be dialled."""

    cone: Fraction = Field(0.0, description="One outside port for all destinations.")
    symmetric: Fraction = Field(0.0, description="An outside port for each destination.")

    @model_validator(mode="after")
    def _check(self) -> NatSettings:
        if self.cone + self.symmetric > 1 + 1e-9:
            raise broken_rule(f"must be at most 1 together with cone = {self.cone:g}", "symmetric", self.symmetric)
        return self


NO_DURATION = {
    "kill": "a kill is permanent; 'restart' starts the peer again",
    "join": "a join has no duration",
    "disconnect": "a disconnect has no duration: the two can reconnect at once; a partition lasts",
}


class FaultSettings(Section):
    """One scripted fault."""

    fault: Kind = Field(description="Kind of fault.")
    round: Positive = Field(description="Round in which it strikes: it is armed when the previous round is committed.")
    peer: Text | None = Field(None, description="The victim. Default: the peer that reaches the point first.")
    peers: tuple[Text, ...] = Field(
        (), description="For a partition, the peers of one side; for a disconnect, the two peers. Default: `peer` alone.")
    at: Point = Field(IMMEDIATELY, description="Point of the round at which it strikes.")
    skip: Count = Field(0, description="Times that the point is passed before.")
    delay_s: NonNegative = Field(0.0, description="Seconds from the point to the fault.")
    seconds: PositiveNumber | None = Field(
        None,
        description="Duration; for `restart` and `leave`, time until the new start. Default: 10; for `leave`, no new start.",
    )
    factor: PositiveNumber = Field(4.0, description="For `slow`: factor by which training slows down.")
    what: Corruption = Field("parts", description="For `corrupt`: what is corrupt.")

    @model_validator(mode="after")
    def _check(self) -> FaultSettings:
        if self.fault == "join" and self.peer is None:
            raise broken_rule("must name the peer that joins", "peer", self.peer)
        if self.fault not in ("partition", "disconnect") and self.peers:
            raise broken_rule("is for a partition or a disconnect; name one peer with 'peer'", "peers", list(self.peers))
        if self.fault == "disconnect" and self.peers and len(set(self.peers)) != 2:
            raise broken_rule("must be the two peers that lose each other", "peers", list(self.peers))
        if self.seconds is not None and self.fault in NO_DURATION:
            raise broken_rule(NO_DURATION[self.fault], "seconds", self.seconds)
        return self


class ScenarioSettings(Section):
    """A scenario file."""

    peers: Positive = Field(
        5, le=MAX_MEMBERS, description="Trainers at the start: peer-0, peer-1, ... The bootstrap peer is not counted.")
    rounds: Positive = Field(50, description="Rounds with faults.")
    fault_rate: Fraction = Field(0.0, description="Probability of a random fault in each round.")
    kinds: tuple[Kind, ...] = Field(get_args(Kind), description="Kinds of the random faults.")
    points: tuple[Point, ...] = Field((), description="Points of the random faults. Default: all.")
    step_s: PositiveNumber = Field(2.5, description="Seconds per local step at speed 1 (virtual form).")
    latency_s: Latencies = Field(
        (0.05, 0.05), description="One-way seconds between two peers. [least, greatest]: the seed draws each peer's; between "
        "two it is their mean (virtual form).")
    bandwidth: Bandwidth = Field("100mbit", description="Bandwidth of every peer's link, each way.")
    upload: Bandwidth | None = Field(None, description="Bandwidth of every peer's upload, if that is another (virtual form).")
    nat: NatSettings = Field(
        NatSettings(), description="Shares of the trainers behind NATs, drawn by the seed (virtual form).")
    loss: Losses = Field(
        (0.0, 0.0), description="Share of packets that each trainer's link loses. [least, greatest]: the seed draws each one's "
        "(virtual form).")
    vary: bool = Field(True, description="Each seed chooses speeds, capacities, codec, redundancy and merging (virtual form).")
    overlap: bool = Field(False, description="Overlap rounds with training (`sync.overlap`).")
    churn: NonNegative = Field(
        0.0, description="Seconds of a day in which peers come and go like volunteers (virtual form); 0: they stay.")
    machines: dict[str, MachineSettings] = Field({}, description="Machines of single peers, by name.")
    faults: tuple[FaultSettings, ...] = Field((), description="Scripted faults.")
    attackers: Count = Field(0, description="Number of the trainers that attack: the last ones.")
    attacks: tuple[AttackKind, ...] = Field(ATTACK_KINDS, description="Kinds of attacks, one in each run.")
    admission: Literal["friends", "open"] = Field(
        "friends", description="The campaign's rule. open: every second honest trainer is vouched for, and liars that need it.")
    audited_share: Fraction = Field(
        AUDITED_SHARE, description="Of the phases in an open campaign, the share that audits draw (`sync.audited_share`).")

    @model_validator(mode="after")
    def _check(self) -> ScenarioSettings:
        joiners = {fault.peer for fault in self.faults if fault.fault == "join" and fault.peer is not None}
        known = {*peer_names(self.peers), *joiners, BOOTSTRAP}
        for name in self.machines:
            if name not in known:
                raise broken_rule(f"no such peer; there are {_shown(known)}", f"machines.{name}", "given")
        if BOOTSTRAP in self.machines and self.machines[BOOTSTRAP].nat not in (None, "open"):
            raise broken_rule("must be open: others join by it", f"machines.{BOOTSTRAP}.nat", self.machines[BOOTSTRAP].nat)
        if self.attackers and 2 * self.attackers >= self.peers:
            raise broken_rule(f"must be less than half of the {self.peers} peers", "attackers", self.attackers)
        if "attacks" in self.model_fields_set and not self.attackers:
            raise broken_rule("needs attackers; name their number, too", "attacks", ",".join(self.attacks))
        _check_lives(self, known)
        return self


@dataclass(frozen=True)
class Scenario:
    """A valid scenario."""

    peer_names: tuple[str, ...]
    """Trainers at the start."""
    rounds: int
    faults: tuple[Fault, ...] = ()
    fault_rate: float = 0.0
    """Probability of a random fault in each round."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of random faults."""
    points: tuple[str, ...] = ()
    """Points of random faults; empty: all."""
    step_s: float = 2.5
    """Seconds per local step at speed 1."""
    latencies_s: tuple[float, float] = (0.05, 0.05)
    """One-way seconds between two peers: the least and the greatest."""
    bandwidth_bytes_per_s: float = 12.5e6
    upload_bytes_per_s: float | None = None
    """None: the same."""
    nats: Mapping[Nat, float] = field(default_factory=dict)
    """Shares of the trainers behind NATs of each kind."""
    losses: tuple[float, float] = (0.0, 0.0)
    """Share of packets that a trainer's line loses: the least and the greatest."""
    vary: bool = True
    """Let each seed choose speeds, capacities, codec, redundancy and merging."""
    overlap: bool = False
    """Whether rounds overlap with training."""
    churn: float = 0.0
    """Seconds of a day in which volunteers come and go (`churn.py`); 0: they stay."""
    are_kinds_chosen: bool = False
    """Whether the user chose the kinds."""
    machines: Mapping[str, MachineSettings] = field(default_factory=dict)
    attackers: int = 0
    """How many of the peers attack, the last ones. With any, peers train a real model, also in the runs without attack."""
    attacks: tuple[AttackKind, ...] = ()
    """Kinds of attacks, one in each run."""
    attack: AttackKind | None = None
    """The kind of this run."""
    seated: bool = False
    """In a run without attack: whether attackers have the seats that some kinds need."""
    admission: Literal["friends", "open"] = "friends"
    audited_share: float = AUDITED_SHARE
    """Of the phases in an open campaign, the share that audits draw."""
    config: Path | None = None
    """Campaign file whose model and text the peers train instead of the small ones (virtual form, with attackers)."""
    device: str = "cpu"
    """Where they train."""

    @property
    def latency_s(self) -> float:
        """Mean one-way seconds between two peers."""
        return sum(self.latencies_s) / 2

    @property
    def liars(self) -> tuple[str, ...]:
        """The identities of the peers that attack in this run."""
        if self.attack is None:
            return ()
        more = range(1, ATTACKS[self.attack].identities)
        attackers = self.peer_names[len(self.peer_names) - self.attackers :]
        return attackers + tuple(f"{name}-{number}" for name in attackers for number in more)

    @property
    def vouched(self) -> tuple[str, ...]:
        """Trainers that the owner of an open campaign vouches for: some honest ones, and attackers that need a seat."""
        if self.admission != "open":
            return ()
        honest = len(self.peer_names) - self.attackers
        return self.peer_names[:honest:2] + (self.peer_names[honest:] if self.are_captured else ())

    @property
    def are_captured(self) -> bool:
        """Whether the owner of an open campaign vouches for the attackers."""
        needed = self.seated or (self.attack is not None and ATTACKS[self.attack].needs_seat)
        return self.admission == "open" and needed

    def machine(self, name: str) -> MachineSettings:
        """Return a peer's machine."""
        return self.machines.get(name, MachineSettings())


def runs_of(scenario: Scenario) -> tuple[Scenario, ...]:
    """Return the runs of one seed: the scenario itself, also with seats for attackers where a kind has some, then each kind."""
    attacked = tuple(replace(scenario, attack=kind) for kind in scenario.attacks)
    clean = (scenario, replace(scenario, seated=True)) if any(each.are_captured for each in attacked) else (scenario,)
    return clean + attacked


def peer_names(count: int) -> tuple[str, ...]:
    """Return the names of the first trainers."""
    return tuple(f"peer-{i}" for i in range(count))


def load_scenario(path: Path | None, options: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a file, or of the defaults, overridden by the options that are not None. Raises UserError."""
    file = read_yaml_mapping(path, "scenario file") if path is not None else None
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("attacks") == ["all"]:
        given["attacks"] = list(ATTACK_KINDS)
    attacked = {"fault_rate": 0.0, "rounds": DEFAULT_ATTACKED_ROUNDS}
    default = attacked if options.get("attackers") else {"fault_rate": 0.0 if options.get("churn") else DEFAULT_FAULT_RATE}
    values = {**(file.values if file is not None else default), **given}
    return _scenario(validated(ScenarioSettings, values, lambda location: _where(file, location, given)))


def _where(file: YamlFile | None, location: tuple[str | int, ...], options: Mapping[str, Any]) -> str:
    """Return where a value was given: file and line, or the option."""
    name = str(location[0]) if location else ""
    if name in options:
        return f"--{OPTIONS.get(name, name).replace('_', '-')}"
    return file.where(location) if file is not None else ""


def _scenario(settings: ScenarioSettings) -> Scenario:
    late = (Fault("join", 1 + settings.rounds // 3, peers=(LATE_JOINER,)),) if settings.attackers else ()
    return Scenario(
        peer_names=peer_names(settings.peers),
        rounds=settings.rounds,
        faults=(*(_fault(fault) for fault in settings.faults), *late),
        fault_rate=settings.fault_rate,
        kinds=settings.kinds,
        points=settings.points,
        step_s=settings.step_s,
        latencies_s=settings.latency_s,
        bandwidth_bytes_per_s=bytes_per_s(settings.bandwidth),
        upload_bytes_per_s=None if settings.upload is None else bytes_per_s(settings.upload),
        nats={"cone": settings.nat.cone, "symmetric": settings.nat.symmetric},
        losses=settings.loss,
        vary=settings.vary,
        overlap=settings.overlap,
        churn=settings.churn,
        are_kinds_chosen="kinds" in settings.model_fields_set,
        machines=settings.machines,
        attackers=settings.attackers,
        attacks=settings.attacks if settings.attackers else (),
        admission=settings.admission,
        audited_share=settings.audited_share,
    )


def _fault(settings: FaultSettings) -> Fault:
    named = settings.peers or ((settings.peer,) if settings.peer is not None else ())
    one = named[0] if len(named) == 1 and settings.fault != "join" else None
    seconds = settings.seconds if settings.seconds is not None else 0.0 if settings.fault == "leave" else DEFAULT_SECONDS
    return Fault(
        settings.fault, settings.round, settings.at, one, named, settings.skip, settings.delay_s, seconds,
        settings.factor, settings.what,
    )


def _check_lives(settings: ScenarioSettings, known: set[str]) -> None:
    """Raise an error for the first fault whose victims do not exist, or are dead according to the script before it."""
    state = dict.fromkeys([*peer_names(settings.peers), BOOTSTRAP], "there")
    order = sorted(range(len(settings.faults)), key=lambda index: settings.faults[index].round)
    for index in order:
        fault = settings.faults[index]
        if fault.round > settings.rounds:
            raise broken_rule(f"is after the last round, {settings.rounds}", f"faults.{index}.round", fault.round)
        for name in (*fault.peers, *((fault.peer,) if fault.peer is not None else ())):
            place = f"faults.{index}.{'peers' if fault.peers else 'peer'}"
            if name not in known:
                raise broken_rule(f"no such peer; there are {_shown(known)}", place, name)
            _check_life(fault, state.get(name, "absent"), place, name)
            returns = fault.seconds is not None
            state[name] = "there" if returns else {"kill": "killed", "leave": "left"}.get(fault.fault, "there")


def _check_life(fault: FaultSettings, state: str, place: str, name: str) -> None:
    if fault.fault == "join" and state != "absent":
        raise broken_rule(f"cannot join in round {fault.round}: it is {state} already", place, name)
    if fault.fault == "leave" and name == BOOTSTRAP:
        raise broken_rule("the bootstrap peer does not leave; kill or restart it", place, name)
    if fault.fault != "join" and state != "there":
        why = "has not joined by" if state == "absent" else f"was {state} before"
        raise broken_rule(f"{why} round {fault.round}", place, name)


def bytes_per_s(text: str) -> float:
    """Return the bytes per second of a bandwidth such as 100mbit."""
    return parse_bits_per_second(text, "bandwidth") / 8


def _shown(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered) if len(ordered) <= 12 else f"{', '.join(ordered[:10])} and {len(ordered) - 10} more"

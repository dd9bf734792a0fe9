"""A peer's plan as a table and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.table import Table

from spes_p2p.campaign.lines import Pace
from spes_p2p.campaign.planner import PeerPlan, WrittenBytes
from spes_p2p.campaign.room import Choice, Device
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.model.memory import Setup
from spes_p2p.model.sizes import sizes_of
from spes_p2p.observe.fitting import FittingTable
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.units import human_bytes, human_count, human_memory, human_seconds

_OPTIMIZERS = {"adamw": "AdamW float32", "adamw8bit": "AdamW 8-bit"}


def plan_json(plan: PeerPlan) -> dict[str, Any]:
    """Return all numbers of a plan: sizes in bytes, `minutes` for a round's traffic."""
    values: dict[str, Any] = to_json(plan)
    values["choice"]["device"]["total"] = plan.choice.device.total
    values["host"]["total"], values["disk"]["total"] = plan.host.total, plan.disk.total
    values["host_with_base"]["total"] = plan.host_with_base.total
    values["bootstrap_disk"]["total"] = plan.bootstrap_disk.total
    for name in ("written", "written_with_arrays", "written_with_base"):
        written: WrittenBytes = getattr(plan, name)
        values[name] |= {"total": written.total, "campaign": written.campaign}
    values["target"]["reserved"] = plan.target.reserved
    values["join_with"] = join_flags(plan.choice.setup)
    values["traffic"]["minutes"] = plan.traffic.seconds / 60
    return values


def describe_setup(setup: Setup, num_experts: int) -> str:
    """'12 of 16 experts, AdamW float32, foreign experts bf16, micro-batch 1'."""
    words = [f"{setup.owned} of {num_experts} experts", "Muon and " * setup.muon + _OPTIMIZERS[setup.optimizer]]
    if setup.owned < num_experts:
        words.append(f"foreign experts {setup.stored}" + (" in host memory" if setup.stored_on == "host" else ""))
    words.append(f"micro-batch {setup.micro_batch}" + f" on each of {setup.ranks} devices" * (setup.ranks > 1))
    return ", ".join(words + ["checkpointing"] * setup.checkpointing + ["layers divided among them"] * setup.sharded)


def render_plan(plan: PeerPlan) -> Table:
    """Render a plan as a table of two columns: resource, amount."""
    table = Table("", title=f"{plan.campaign}: one peer with {_memory(plan.target)}", show_header=False)
    whole, shared, expert = map(_parameters, (plan.parameters, plan.shared_parameters, plan.expert_parameters))
    table.add_row("parameters", f"{whole} ({shared} shared, {plan.num_experts} experts of {expert})")
    table.add_row("fits", describe_setup(plan.choice.setup, plan.num_experts))
    table.add_row("speed", str(plan.costs))
    table.add_row("join with", join_flags(plan.choice.setup))
    table.add_row("device memory", _device(plan.choice, plan.target.reserved))
    with_base = human_bytes(plan.host_with_base.total)
    table.add_row("host memory", f"{_sizes(plan.host)}; with --base ram {with_base}; what else is free speeds up the disk")
    table.add_row("disk", f"{_sizes(plan.disk)}; fetched text comes on top, at most --token-cache")
    table.add_row("a bootstrap peer's", f"{_sizes(plan.bootstrap_disk)}")
    in_memory = f"with a round's arrays in memory {_written(plan.written_with_arrays)}"
    table.add_row("written", f"{_written(plan.written)}; {in_memory}; with --base ram {_written(plan.written_with_base)}")
    traffic = plan.traffic
    alike = f"{traffic.peers} peers alike, {traffic.owned} experts each"
    if traffic.owned_by_anyone < plan.num_experts:
        alike += f" (only {traffic.owned_by_anyone} of {plan.num_experts} trained)"
    moved = f"{human_bytes(traffic.up_bytes)} up, {human_bytes(traffic.down_bytes)} down"
    speed = f"{human_count(traffic.bits_per_second)}bit/s"
    table.add_row("a round", f"{moved}, {human_seconds(traffic.seconds)} at {speed} ({alike})")
    table.add_section()
    for alternative in plan.alternatives:
        setup = describe_setup(alternative.choice.setup, plan.num_experts)
        is_chosen, longer = alternative.choice == plan.choice, alternative.step_s / plan.step_s
        table.add_row(alternative.means, setup + ("" if is_chosen else f"; a step takes {longer:.2g} times as long"))
    return table


def pace_json(pace: Pace) -> dict[str, Any]:
    """Return all numbers of a choice for a line."""
    values: dict[str, Any] = to_json(pace)
    codec = pace.codec.model_dump()
    derived = {"exchange_share": pace.exchange_share, "tokens_per_day": pace.tokens_per_day, "speedup": pace.speedup}
    return {**values, "codec": codec, **derived}


def render_lines(campaign: str, chosen: Sequence[Pace], assumes: str) -> FittingTable:
    """Render the phase length and codecs for several lines. `assumes`: where the seconds of a step come from."""
    columns = {
        "line": [f"{human_count(pace.bits_per_second)}bit/s" for pace in chosen],
        "shared, experts": [f"{pace.codec.shared}, {pace.codec.experts}" for pace in chosen],
        "sync_steps": [f"{pace.sync_steps}, {human_seconds(pace.phase_seconds)}" for pace in chosen],
        "sent\na round": [human_bytes(pace.up_bytes) for pace in chosen],
        "of the\ntime": [f"{100 * pace.exchange_share:.0f} %" for pace in chosen],
        "tokens/day": [human_count(pace.tokens_per_day) for pace in chosen],
    }

    def without(names: Collection[str]) -> Table:
        table = Table(title=f"{campaign}: {chosen[0].peers} such peers, by line ({assumes})")
        kept = {name: cells for name, cells in columns.items() if name not in names}
        for name in kept:
            table.add_column(name, no_wrap=name != "shared, experts")
        for row in zip(*kept.values(), strict=True):
            table.add_row(*row)
        return table

    return FittingTable(without, ("of the\ntime", "sent\na round", "tokens/day"))


def join_flags(setup: Setup, devices: str = "all") -> str:
    """Return the options of `spes-p2p join` for this setup; `devices` names those of a setup with several."""
    flags = [f"--devices {devices}"] * (setup.ranks > 1) + [f"--experts {setup.owned}"] * (setup.owned > 0)
    flags += [f"--stored {setup.stored}", f"--micro-batch-size {setup.micro_batch}"]
    flags += ["--stored-on host"] * (setup.stored_on == "host")
    flags += [f"--optimizer {setup.optimizer}"] * (setup.optimizer != "adamw")
    return " ".join(flags + ["--activation-checkpointing"] * setup.checkpointing + ["--sharding"] * setup.sharded)


def _memory(target: Device) -> str:
    """'24 GiB' or '24 GiB on each of 4 GPUs'."""
    return human_memory(target.memory) + f" on each of {target.ranks} GPUs" * (target.ranks > 1)


def _parameters(number: int) -> str:
    return human_count(number).replace("G", "B")


def _device(choice: Choice, reserved: int) -> str:
    sizes = {name: size for name, size in to_json(choice.device).items() if size}
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())
    return f"{human_bytes(choice.device.total)} ({listed}); {human_bytes(reserved)} kept free"


def _sizes(group: Any) -> str:
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in to_json(group).items() if size)
    return f"{human_bytes(group.total)} ({listed})"


def _written(written: WrittenBytes) -> str:
    return f"{human_bytes(written.total)} a round, {human_bytes(written.campaign)} in {written.rounds} rounds"


def describe_size(config: CampaignConfig) -> str:
    """'olmoe, 4 layers, 8 experts, 4.5M parameters'."""
    model = config.model
    parameters = human_count(sizes_of(model).size).replace("G", "B")
    return f"{model.architecture}, {model.num_hidden_layers} layers, {model.moe_num_experts} experts, {parameters} parameters"

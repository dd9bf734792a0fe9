"""How a trainer uses its machine: device, number of experts, storage options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.campaign.free_memory import choose_device, measured
from spes_p2p.campaign.plan_table import describe_setup
from spes_p2p.campaign.planner import Device, join_options, most_experts
from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.errors import UserError
from spes_p2p.model.stored import StoredFormat
from spes_p2p.training.options import TrainingOptions, check_options


@dataclass(frozen=True)
class Resources:
    """Device, number of experts and training options of a trainer."""

    device: str
    experts: int
    """Maximum number of experts to train."""
    options: TrainingOptions
    description: str
    """Shown to the user."""


def choose_resources(settings: PeerConfig, config: CampaignConfig) -> Resources:
    """Return the requested number of experts, or as many as fit in free memory, with matching options.

    Raises UserError for more experts than the model has, for options or a device that this machine lacks, or if the shared
    weights do not fit.
    """
    device, wanted, experts = choose_device(settings.device), settings.experts, config.model.moe_num_experts
    fitting: StoredFormat | None = None
    if wanted == "auto":
        chosen, fitting, description = as_many_as_fit(settings, config, measured(device))
    elif wanted > experts:
        raise UserError(f"--experts {wanted}: the campaign's model has {experts} experts; give at most that, or auto")
    else:
        chosen, description = wanted, f"{wanted} of {experts} experts, as requested"
    options = TrainingOptions(
        stored=fitting if settings.stored == "auto" else settings.stored,
        stored_on=settings.stored_on,
        backend=settings.backend,
        optimizer=settings.optimizer,
        activation_checkpointing=settings.activation_checkpointing,
        micro_batch_size=settings.micro_batch_size,
    )
    check_options(config.model, options, device)
    return Resources(device, chosen, options, description)


def as_many_as_fit(settings: PeerConfig, config: CampaignConfig, device: Device) -> tuple[int, StoredFormat | None, str]:
    """Return the maximum number of experts that fit on a device, the storage format of the others, and a description.

    Raises UserError if the shared weights do not fit.
    """
    free = replace(device.at_most(settings.memory_bytes), base_in_memory=settings.base == "ram")
    possible = replace(
        join_options(config, free.kind),
        optimizer=(settings.optimizer,),
        stored_on=(settings.stored_on,),
        checkpointing=(settings.activation_checkpointing,),
    )
    if settings.stored != "auto":
        possible = replace(possible, stored=(settings.stored,))
    if settings.micro_batch_size is not None:
        possible = replace(possible, micro_batch=(settings.micro_batch_size,))
    named = "--memory" if free.memory == settings.memory_bytes else f"free memory ({device.kind})"
    setup = most_experts(config, free, possible, named).setup
    return setup.owned, setup.stored, describe_setup(setup, config.model.moe_num_experts)

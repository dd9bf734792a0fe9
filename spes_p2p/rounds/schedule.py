"""The training schedule of a phase: the campaign's own, with the changes in the owner's control record."""

from __future__ import annotations

import contextlib
import json

from spes_p2p.config.campaign import CampaignConfig, TrainingConfig, parse_campaign_config
from spes_p2p.consensus.control import is_stopped
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Commit, Control

SCHEDULE_FIELDS = ("learning_rate", "min_lr_ratio", "sync_steps", "total_steps", "warmup_steps")
"""Fields of `training` that the owner can change during a campaign."""


def scheduled(config: CampaignConfig, control: Control | None, round_number: int) -> CampaignConfig:
    """Return the campaign's config in the phase before this round, under this control record.

    All peers ignore an invalid change; the owner's command does not sign one.
    """
    for change in control.changes if control is not None else ():
        if change.round <= round_number:
            with contextlib.suppress(UserError):
                config = changed(config, change.training, "control record")
    return config


def is_over(commit: Commit, config: CampaignConfig, control: Control | None) -> bool:
    """Return whether no round follows this commit under this record: it has the last step, or stopped the campaign."""
    total_steps = scheduled(config, control, commit.round + 1).training.total_steps
    return commit.step >= total_steps or is_stopped(commit.control)


def is_last(commit: Commit, config: CampaignConfig) -> bool:
    """Return whether the round after this commit is the schedule's last if its members train a whole phase for it."""
    training = scheduled(config, commit.control, commit.round + 1).training
    return commit.step + training.sync_steps >= training.total_steps


def last_round(commit: Commit, config: CampaignConfig) -> tuple[TrainingConfig, int]:
    """Return the settings of the phase after this commit, and the number of the campaign's last round as far as it is known.

    Pauses, reforms, rollbacks and new schedules move it.
    """
    training = scheduled(config, commit.control, commit.round + 1).training
    if is_stopped(commit.control):
        return training, commit.round
    left = -(-max(0, training.total_steps - commit.step) // training.sync_steps)
    return training, max(0, commit.round) + left + (config.sync.overlap and commit.round < 1)


def changed(config: CampaignConfig, training: str, where: str) -> CampaignConfig:
    """Return the config with these fields of `training` (JSON). Raises UserError that names `where` and the field."""
    try:
        fields = dict(json.loads(training))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{where}: a change must be a JSON object of fields of training") from None
    unknown = sorted(set(fields) - set(SCHEDULE_FIELDS))
    if unknown:
        names = ", ".join(f"training.{name}" for name in unknown)
        raise UserError(f"{where}: {names} cannot be changed; give one of {', '.join(SCHEDULE_FIELDS)}")
    raw = config.model_dump()
    return parse_campaign_config({**raw, "training": {**raw["training"], **fields}}, where)

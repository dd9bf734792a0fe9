"""Main memory that a peer needs."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.content.bases import KEPT_SNAPSHOTS
from spes_p2p.model.layout import Group
from spes_p2p.model.memory import Setup, host_shards_bytes, shared_elements, stored_bytes
from spes_p2p.model.sizes import sizes_of
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.outer import base_size

PIECES_BYTES = 2**28
"""Upper bound of a round's buffers in memory, for any model size; 40 MB were measured (docs/communication.md)."""

BASES_IN_MEMORY = KEPT_SNAPSHOTS + 1
"""Those that are served, and the next one."""
PROGRAM_BYTES = 600 * 10**6
"""A trainer's process and its p2pd, without what grows with the model: Python, torch and transformers. 0.55 GB resident were
measured on a CPU after a step of the demo's model (`./tools/bench startup`); CUDA's context comes on top."""
SHARE_FOR_THE_BASE = 0.5
"""A peer that needs at most this share of the free memory holds its bases in memory, unless a setting says otherwise."""


@dataclass(frozen=True)
class HostBytes:
    """Main memory, without memory-mapped files.

    Bases, results and the arrays of a round (`storage/scratch.py`) are mapped files, which free memory caches but which need
    none. With `join --base ram`, the base and the arrays of a round are in memory; with `auto` also the arrays alone.
    """

    base: int
    """The two that are served and the next one, if in memory."""
    update: int
    """The announced update, encoded, if in memory; and the work that is set aside while other weights are measured."""
    sums: int
    """Sums that this peer reduces, their residuals and inputs, if in memory."""
    pieces: int
    """Buffers for parts and pieces in a round."""
    stored: int
    """Foreign experts stored on the host, which all devices share."""
    shards: int
    """Of layers that devices divide, between phases those that are not the first one's."""
    program: int = 0
    """The processes, one per device; 0 where free memory was measured in this process, which holds it already."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.base + self.update + self.sums + self.pieces + self.stored + self.shards + self.program


def host_bytes(
    config: CampaignConfig, setup: Setup, base_in_memory: bool = False, arrays_in_memory: bool = False
) -> HostBytes:
    """Return the main memory of a trainer with this setup. A round's arrays are in memory also where bases are."""
    arrays_in_memory |= base_in_memory
    base = 4 * base_size(sizes_of(config.model), config.outer)
    return HostBytes(
        base=BASES_IN_MEMORY * base * base_in_memory,
        update=(update_bytes(config, setup.owned) + set_aside_bytes(config, setup.owned)) * arrays_in_memory,
        sums=(2 * sums_bytes(config) + inputs_bytes(config)) * arrays_in_memory,
        pieces=min(PIECES_BYTES, base),
        stored=stored_bytes(config.model, setup) if setup.stored_on == "host" else 0,
        shards=host_shards_bytes(config.model, setup) if setup.sharded else 0,
    )


def update_bytes(config: CampaignConfig, owned: int) -> int:
    """Return the bytes of an encoded update of the shared weights and this many experts, in the last round the most."""
    layout, codecs = sizes_of(config.model), group_codecs(config.sync.codec)
    groups = [*(group for group in layout.groups if group.expert is None), *[layout.expert(0)] * owned]
    return sum(codecs.of(group, is_last=True).encoded_bytes(group.size) for group in groups)


def trained_bytes(config: CampaignConfig, owned: int) -> int:
    """Return the bytes of the same weights, in float32."""
    layout = sizes_of(config.model)
    return 4 * (shared_elements(layout) + owned * layout.expert(0).size)


def set_aside_bytes(config: CampaignConfig, owned: int) -> int:
    """Return the bytes of pending work where other weights are measured: by whoever evaluates a base or, in an open campaign,
    judges a round or audits a phase."""
    evaluates = config.evaluation.every_rounds > 0 and config.data.validation_manifest is not None
    return trained_bytes(config, owned) if evaluates or config.admission == "open" else 0


def sums_bytes(config: CampaignConfig) -> int:
    """Return the bytes of the sums that one of several identical trainers reduces."""
    return all_sums_bytes(config) // max(2, config.sync.min_peers)


def all_sums_bytes(config: CampaignConfig) -> int:
    """Return the bytes of the sums of all groups that several peers train; a bootstrap peer may reduce nearly all of them."""
    return 4 * sum(group.size for group in _trained_by_several(config))


def inputs_bytes(config: CampaignConfig) -> int:
    """Return the bytes of the encoded updates behind the sums of one of several identical trainers.

    Each reduces its share of the sums, of updates of all: those of this round and of the one before are kept.
    """
    codecs = group_codecs(config.sync.codec)
    return 2 * sum(codecs.of(group, is_last=True).encoded_bytes(group.size) for group in _trained_by_several(config))


def _trained_by_several(config: CampaignConfig) -> list[Group]:
    return [group for group in sizes_of(config.model).groups if group.expert is None or config.experts.redundancy > 1]

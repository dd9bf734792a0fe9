"""What the owner of a new campaign chooses, and the settings that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spes_p2p.config.campaign import CodecConfig

if TYPE_CHECKING:
    from spes_p2p.campaign.lines import Pace
    from spes_p2p.campaign.start import Start

ROUNDS_AT_LEAST = 10
WARMUP_SHARE, MERGE_SHARE = 0.05, 0.5
"""Fractions of the steps, as in SPES: a short learning rate warm-up, and merging in the first part of training."""


@dataclass(frozen=True)
class Recipe:
    """Training settings."""

    sequence_length: int
    batch_size: int
    micro_batch_size: int | None
    """None: each peer's own choice, up to the batch."""
    sync_steps: int
    learning_rate: str
    embedding_lr_ratio: float
    beta2: float
    optimizer: str


@dataclass(frozen=True)
class Size(Recipe):
    """A model size and its training settings, with SPES's ratios at every scale.

    Measurements support the settings of the first size (docs/learning.md). Larger sizes approach SPES's settings; the last two
    use them, but with twice the rounds at half the bits. Muon, whose moment never has 8 bits, is for those that need none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    moe_num_experts: int
    moe_top_k: int
    about: str
    """Description for the user; parameters exclude embeddings."""


SIZES = {
    "tiny": Size(128, 8, 8, 10, "2.0e-3", 16.0, 0.999, "muon", 128, 256, 4, 4, 8, 2, "3.4M, a laptop suffices"),
    "small": Size(1024, 32, 8, 25, "1.0e-3", 4.0, 0.999, "muon", 512, 512, 8, 8, 8, 2, "59M, any GPU"),
    "medium": Size(2048, 64, 4, 50, "6.0e-4", 4.0, 0.999, "adamw", 768, 1024, 12, 12, 16, 2, "481M, GPUs from 8 GB"),
    "1b": Size(
        2048, 256, 8, 50, "5.0e-4", 1.0, 0.95, "adamw", 768, 2048, 12, 12, 16, 2, "0.93B, GPUs from 8 GB; SPES's smallest"
    ),
    "7b": Size(2048, 1024, 2, 50, "4.0e-4", 1.0, 0.95, "adamw", 2048, 2048, 16, 16, 32, 4, "6.7B, GPUs from 16 GB; SPES's"),
}
CONTINUED = Recipe(2048, 64, None, 50, "1.0e-4", 1.0, 0.95, "adamw")
"""For existing weights: SPES's learning rate for its upcycled 9B model."""
OUTER_FROM_STEPS = 30
"""Phases of so many steps gain from outer momentum (docs/learning.md). With existing weights it was not measured."""
UPCYCLED_ALPHA, RANDOM_ALPHA = 0.05, 0.1
"""First alpha of merging experts: SPES's for upcycled ones, ours for random ones. Experts of a checkpoint are not merged."""


@dataclass(frozen=True)
class TextSource:
    """Text with a name and a share of the samples."""

    name: str
    weight: float
    texts: tuple[Path, ...]


@dataclass(frozen=True)
class Answers:
    """Choices of the campaign's owner."""

    folder: Path
    name: str
    size: str
    texts: tuple[Path, ...]
    held_out: tuple[Path, ...]
    tokenizer: Path | int
    """Path of a tokenizer.json, or the vocabulary size of a tokenizer to train."""
    peers: int
    """Expected trainers; the first round waits for them."""
    epochs: float
    """Passes over the training text."""
    admission: str = "friends"
    """Who may take part: see `CampaignConfig`."""
    url: str | None = None
    """URL where the token files will be published; None: only peers serve them."""
    sources: tuple[TextSource, ...] = ()
    """The same texts, if they have names and weights."""
    start: Start | None = None
    """Existing weights to begin with; the model's size and tokenizer are then the checkpoint's."""
    line: float | None = None
    """Bits per second of the trainers' internet lines, which decide phase length and codecs; None: those of the size."""
    pace: Pace | None = None
    """That decision."""

    @property
    def recipe(self) -> Recipe:
        """Training settings for the model and the lines."""
        recipe: Recipe = CONTINUED if self.start is not None else SIZES[self.size]
        if self.start is not None:
            recipe = replace(recipe, sequence_length=min(recipe.sequence_length, self.start.model.max_position_embeddings))
        return recipe if self.pace is None else replace(recipe, sync_steps=self.pace.sync_steps)

    @property
    def codec(self) -> CodecConfig:
        """Codecs of the updates."""
        return CodecConfig() if self.pace is None else self.pace.codec


@dataclass(frozen=True)
class Schedule:
    """Settings derived from text, peers and size."""

    total_steps: int
    warmup_steps: int
    merge_interval: int
    merge_decay_steps: int


def make_schedule(recipe: Recipe, tokens: int, peers: int, epochs: float) -> Schedule:
    """Return the schedule for `epochs` passes over `tokens`: whole rounds, at least ROUNDS_AT_LEAST of them."""
    step_tokens = recipe.batch_size * recipe.sequence_length * peers
    rounds = max(ROUNDS_AT_LEAST, round(tokens * epochs / (step_tokens * recipe.sync_steps)))
    steps = rounds * recipe.sync_steps
    return Schedule(
        total_steps=steps,
        warmup_steps=round(WARMUP_SHARE * steps),
        merge_interval=4 * recipe.sync_steps,
        merge_decay_steps=round(MERGE_SHARE * steps),
    )

"""The campaign's rules (the same on every peer, hashed) and one peer's own settings.

A campaign file is YAML with the sections below; every field is documented where it is declared, and `docs/configuration.md` is
generated from here. Names are SPES's where SPES has them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spes_p2p import __version__
from spes_p2p.config.problems import Location, broken_rule, validated
from spes_p2p.config.types import (
    CODEC_NAMES,
    AutoOrPositive,
    CampaignName,
    CodecName,
    Count,
    Decay,
    Fraction,
    IPAddress,
    Multiaddr,
    NonNegative,
    Port,
    Positive,
    PositiveNumber,
    Text,
    Whole,
)
from spes_p2p.config.yaml_file import read_yaml_mapping
from spes_p2p.errors import UserError

UPGRADE = "upgrade: pip install --upgrade spes_p2p"
DEFAULT_TOKEN_CACHE_BYTES = 16 * 2**30
SCHEMA_VERSION = 1
"""Of the campaign file. A field that is left out means what its default was in the file's schema version, so a default may
change only with a new version, and new fields need a default under which older campaigns stay as they are."""
SLOWEST_LINE_BITS = 1e6
"""Below this rate, bits a second, heartbeats queue behind a part past the timeout."""


class Section(BaseModel):
    """A group of settings: unknown fields are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Shape of the mixture-of-experts model."""

    architecture: Literal["olmoe", "qwen3_moe"] = Field("olmoe", description="Model class of transformers.")
    vocab_size: Positive = Field(description="Rows of the embedding; at least the tokenizer's number of ids.")
    hidden_size: Positive = Field(description="Width of the residual stream.")
    intermediate_size: Positive = Field(description="Width of one expert's hidden layer.")
    num_hidden_layers: Positive = Field(description="Transformer layers.")
    num_attention_heads: Positive = Field(description="Attention heads.")
    num_key_value_heads: Positive = Field(description="Key/value heads (fewer than attention heads: grouped-query attention).")
    max_position_embeddings: Positive = Field(description="Longest sequence that the model can take.")
    moe_num_experts: Positive = Field(description="Experts a layer.")
    moe_top_k: Positive = Field(description="Experts that each token is sent to.")
    moe_low_rank: Count = Field(
        0, description="Rank of a term of each expert's matrices that all peers train, not only its owners: it belongs to the "
        "shared weights, and an export adds it in. 0: none; else a multiple of 8.")
    norm_topk_prob: bool = Field(False, description="Scale the top-k router probabilities to sum to 1.")
    rope_theta: PositiveNumber = Field(10000.0, description="Base of the rotary embedding.")
    tie_word_embeddings: bool = Field(False, description="Use the embedding matrix as output head.")
    initializer_range: NonNegative = Field(0.02, description="Standard deviation of the initial weights.")
    seed: Whole = Field(0, description="Seed of base 0, which the bootstrap peer makes once.")

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        _require(self.moe_top_k <= self.moe_num_experts, "moe_top_k", self.moe_top_k,
                 f"must be at most moe_num_experts = {self.moe_num_experts}")
        _require(self.moe_low_rank % 8 == 0, "moe_low_rank", self.moe_low_rank, "must be a multiple of 8")
        _require(self.moe_low_rank <= min(self.hidden_size, self.intermediate_size), "moe_low_rank", self.moe_low_rank,
                 "must be at most hidden_size and intermediate_size")
        _require(self.hidden_size % (2 * self.num_attention_heads) == 0, "hidden_size", self.hidden_size,
                 f"must be a multiple of twice num_attention_heads = {self.num_attention_heads}")
        _require(self.num_attention_heads % self.num_key_value_heads == 0, "num_key_value_heads", self.num_key_value_heads,
                 f"must divide num_attention_heads = {self.num_attention_heads}")
        return self


class TrainingConfig(Section):
    """Local steps: batch, optimizer, schedule, losses."""

    sequence_length: Annotated[int, Field(strict=True, ge=2)] = Field(description="Tokens in one sample.")
    batch_size: Positive = Field(description="Samples in one local step of one peer.")
    micro_batch_size: Positive | None = Field(
        None, description="Samples in one forward pass; a step accumulates over them. Default: batch_size.")
    total_steps: Positive = Field(description="Campaign steps until the end; the schedule's length.")
    sync_steps: Positive = Field(description="Campaign steps between two rounds.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="Of local steps. muon: for the matrices of attention and experts, at the same learning rate and "
        "with one moment in place of two; AdamW for embeddings, head, routers and vectors.")
    learning_rate: PositiveNumber = Field(description="Peak learning rate.")
    embedding_lr_ratio: PositiveNumber = Field(
        1.0, description="Learning rate of the embedding and the output head over that of the other weights.")
    warmup_steps: Count = Field(0, description="Campaign steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Learning rate at the end, as a share of the peak (cosine).")
    beta1: Decay = Field(0.9, description="AdamW's first moment decay.")
    beta2: Decay = Field(0.95, description="AdamW's second moment decay.")
    second_moment_peers: AutoOrPositive = Field(
        1, description="AdamW's second moment of shared weights and routers is that of a batch as large as so many peers' "
        "together: the noise of their averaged updates instead of one peer's. auto: as many as train in the phase; one where a "
        "volunteer's moments have 8 bits.")
    eps: PositiveNumber = Field(1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(0.1, description="Decoupled weight decay.")
    decay_norm_and_bias: bool = Field(False, description="Apply weight decay to norms and biases too.")
    decay_embeddings: bool = Field(False, description="Apply weight decay to the embeddings too.")
    max_grad_norm: PositiveNumber = Field(1.0, description="Gradients are clipped to this global norm.")
    new_owner_ramp_steps: Count = Field(
        20, description="Local steps over which an expert with fresh moments gets its full learning rate.")
    moe_loss_weight: NonNegative = Field(
        0.01, description="Weight of the load-balancing loss (per layer, then averaged over layers).")
    moe_zloss_weight: NonNegative = Field(0.001, description="Weight of the router's z-loss.")
    lm_head_zloss_weight: NonNegative = Field(0.0, description="Weight of the z-loss on the output logits (SPES: 1e-5).")
    instance_filter: bool = Field(
        False, description="Leave out samples with 32 repetitions in a row of up to 13 tokens (OLMo's rule).")
    seed: Whole = Field(0, description="Seed of the data order.")

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        micro = self.micro_batch_size
        _require(micro is None or self.batch_size % micro == 0, "micro_batch_size", micro,
                 f"must divide batch_size = {self.batch_size}")
        _require(self.second_moment_peers == 1 or self.beta2 > 0, "second_moment_peers", self.second_moment_peers,
                 "must be 1 where beta2 = 0")
        _require(self.warmup_steps < self.total_steps, "warmup_steps", self.warmup_steps,
                 f"must be less than total_steps = {self.total_steps}")
        _require(self.total_steps % self.sync_steps == 0, "total_steps", self.total_steps,
                 f"must be a multiple of sync_steps = {self.sync_steps}")
        return self


class ExpertsConfig(Section):
    """Who trains which expert."""

    experts_per_peer: Positive | None = Field(
        None, description="Most experts one peer trains. Default: as many as it takes to own all.")
    redundancy: Positive = Field(1, description="Owners an expert has where capacity allows.")


class MergeConfig(Section):
    """SPES's expert-merging warm-up, after a round.

    `w <- w + alpha (mean(donors) - w)`, `alpha = merge_alpha_start * max(0, 1 - step / merge_decay_steps)` (arXiv 2602.11543).
    """

    merge_interval: Positive | None = Field(
        None, description="Campaign steps between two merges, a multiple of sync_steps. Default: never merge.")
    merge_alpha_start: Fraction = Field(0.1, description="Alpha at step 0.")
    merge_decay_steps: Positive = Field(1000, description="Campaign step at which alpha reaches 0.")
    merge_top_k: Positive = Field(
        4, description="Donors of each expert: the most similar others (fewer when there are fewer others).")


class CodecConfig(Section):
    """How updates are encoded, by what they are updates of; one name in place of this section stands for all three.

    What a codec drops stays with the sender and goes with the next round's update (error feedback).
    """

    router: CodecName = Field("none", description="Of the routers: small, and a rounded one sends tokens elsewhere.")
    shared: CodecName = Field(
        "int4", description="Of the other weights that every peer trains: each peer's update, and the reducers' mean of them.")
    experts: CodecName = Field("int4", description="Of the experts; what one owner sends is averaged with nobody's.")

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        if isinstance(value, str):
            if value not in CODEC_NAMES:
                raise broken_rule(f"must be one of {', '.join(CODEC_NAMES)}, or a section with router, shared and experts")
            return dict.fromkeys(cls.model_fields, value)
        return value


class OuterConfig(Section):
    """The outer step: how a round's mean update moves the base.

    `m <- momentum * m + update; w <- w + learning_rate * (update + momentum * m)`; 1 and 0 are plain averaging, as SPES has it.
    """

    shared_learning_rate: PositiveNumber = Field(1.0, description="Outer learning rate of the shared weights.")
    shared_momentum: Decay = Field(
        0.0, description="Nesterov momentum of the shared weights; where it is not 0, a base is larger by them.")
    router_learning_rate: PositiveNumber = Field(1.0, description="Outer learning rate of the routers.")
    router_momentum: Decay = Field(0.0, description="Nesterov momentum of the routers.")
    experts_learning_rate: PositiveNumber = Field(1.0, description="Outer learning rate of the experts.")
    experts_momentum: Decay = Field(0.0, description="Nesterov momentum of the experts; a base is larger by all of them.")


class SyncConfig(Section):
    """The round: what is sent, and how long anybody is waited for."""

    codec: CodecConfig = Field(
        CodecConfig(), description="How updates are encoded: one name for all, or a section (below).")
    overlap: bool = Field(
        False, description="Train on while a round goes on: what it decides is applied when the phase that goes on meanwhile "
        "ends, so updates are one phase late. Round 1 then moves nothing, and the campaign has one round more.")
    min_peers: Positive = Field(1, description="Trainers that must be there before the first round is planned.")
    join_grace_s: NonNegative = Field(
        5.0, description="Seconds that the first round waits for more trainers after min_peers are there.")
    silence_s: PositiveNumber = Field(
        10.0, description="Longest silence of a living peer; heartbeats teach the swarm a shorter bound.")
    reform_after_s: PositiveNumber = Field(
        60.0, description="A bootstrap peer reforms the swarm when for so many seconds it sees no majority of the electors, or "
        "nobody who has the newest base.")
    exchange_timeout_s: PositiveNumber = Field(
        600.0, description="Longest exchange; what is not there by then is dropped from the round.")


class EvaluationConfig(Section):
    """Held-out loss during training."""

    every_rounds: Count = Field(5, description="Rounds between two evaluations on the held-out text; 0: never.")
    max_samples: Positive = Field(64, description="Held-out samples used.")


class DataConfig(Section):
    """Token files. Their manifest, their pieces and the tokenizer come from the swarm; pieces that no peer gives are read
    where the manifest says that the token files are published (`--url` of `spes-p2p tokenize`)."""

    manifest: Text = Field(
        description="Manifest of the training token files, as `spes-p2p tokenize` writes it; relative to the campaign file.")
    validation_manifest: Text | None = Field(None, description="Manifest of the held-out token files.")
    tokenizer: Text = Field(description="tokenizer.json; relative to the campaign file.")
    eos_token: Text = Field("<|endoftext|>", description="The token that ends each document.")
    pad_token: Text | None = Field(None, description="Padding token of the exported tokenizer. Default: the end token.")


class CampaignConfig(Section):
    """One training run. The same on every peer; `Campaign.hash` says so."""

    schema_version: Positive = Field(
        1, description="Version of this file's fields; it fixes what a field that is left out means.")
    name: CampaignName = Field(description="Name of the campaign: 1 to 63 letters, digits, '.', '_' or '-'.")
    model: ModelConfig
    training: TrainingConfig
    experts: ExpertsConfig = ExpertsConfig()
    merge: MergeConfig = MergeConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    data: DataConfig

    @model_validator(mode="after")
    def _check(self) -> CampaignConfig:
        length, longest = self.training.sequence_length, self.model.max_position_embeddings
        _require(length <= longest, "training.sequence_length", length,
                 f"must be at most model.max_position_embeddings = {longest}")
        per_peer, experts = self.experts.experts_per_peer, self.model.moe_num_experts
        _require(per_peer is None or per_peer <= experts, "experts.experts_per_peer", per_peer,
                 f"must be at most model.moe_num_experts = {experts}")
        interval, sync = self.merge.merge_interval, self.training.sync_steps
        _require(interval is None or interval % sync == 0, "merge.merge_interval", interval,
                 f"must be a multiple of training.sync_steps = {sync}")
        return self

    @property
    def total_rounds(self) -> int:
        """The last round. Round 0 only assembles the swarm; where rounds overlap training, round 1 moves no weights either."""
        return self.training.total_steps // self.training.sync_steps + self.sync.overlap


class Campaign(Section):
    """What the bootstrap publishes: the config and the identity of everything it names. Its hash is the campaign's identity."""

    config: CampaignConfig
    manifest_sha256: str
    validation_manifest_sha256: str | None
    tokenizer_sha256: str

    @property
    def hash(self) -> str:
        """Hex sha256 over the canonical JSON; peers of different hashes refuse each other.

        Only what the owner wrote counts: a release that adds a field with a default keeps the hash of every campaign.
        """
        return hashlib.sha256(self.canonical_json()).hexdigest()

    def canonical_json(self) -> bytes:
        """The bytes that are hashed and published."""
        written = self.model_dump(mode="json", exclude_unset=True)
        return json.dumps(written, sort_keys=True, separators=(",", ":")).encode()


class PeerConfig(Section):
    """One peer's own settings: nobody else needs to know them, and they may change from start to start."""

    run_dir: Path = Field(description="Where the peer keeps its state; started on it again, the peer continues.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="What computes: auto takes CUDA where there is one.")
    experts: AutoOrPositive = Field(
        "auto", description="Most experts this peer trains: a number, or auto for what fits in memory.")
    memory_bytes: Positive | None = Field(
        None, description="Memory of the device that auto counts on, at most what is free (--memory 12GiB). Default: all free.")
    stored: Literal["auto", "fp32", "bf16", "int8"] = Field(
        "auto", description="How foreign experts are kept. Default: fp32 on a CPU, bf16 on CUDA, or what fits.")
    stored_on: Literal["device", "host"] = Field(
        "device", description="Where foreign experts are kept: host memory costs a copy of each layer twice a step.")
    backend: Literal["auto", "grouped_mm", "eager", "megablocks"] = Field(
        "auto", description="What computes the experts: auto is grouped_mm where the sizes allow it, else eager.")
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        "adamw", description="Moments in float32, or in 8 bits (needs torchao).")
    activation_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, about a third more time.")
    micro_batch_size: Positive | None = Field(
        None, description="Samples in one forward pass on this machine. Default: the campaign's.")
    base: Literal["disk", "ram"] = Field(
        "disk", description="What the base is read from: its file, memory-mapped, or a copy in memory, 4 bytes a value, which "
                            "no other program's need of memory pushes out (--base ram). What a round keeps is there too.")
    archive_every: Count = Field(
        50, description="Rounds between two bases that a bootstrap peer keeps beside the current one; 0: none.")
    archive_keep: Positive = Field(2, description="How many of them; each takes as much disk as a base.")
    metrics_port: Port | None = Field(None, description="Port of the Prometheus metrics; 0: any free one. Default: no metrics.")
    metrics_host: IPAddress = Field(
        "127.0.0.1", description="Address that the metrics are served on. Anybody who reaches it can read them.")
    tracker: Literal["none", "wandb", "trackio"] = Field(
        "none", description="Experiment tracker that gets this peer's numbers once a round; it must be installed.")
    listen: tuple[Multiaddr, ...] = Field(
        (), description="Addresses to listen on. Default: any free TCP port of every interface.")
    max_upload: Annotated[float, Field(ge=SLOWEST_LINE_BITS)] | None = Field(
        None, description="Bits a second that this peer sends at most (--max-upload 20mbit). Default: no limit.")
    max_download: Annotated[float, Field(ge=SLOWEST_LINE_BITS)] | None = Field(
        None, description="Bits a second that this peer receives at most (--max-download 50mbit). Default: no limit.")
    announce: tuple[Multiaddr, ...] = Field(
        (), description="Addresses that others should dial, behind NAT. Default: those listened on.")
    data_dir: tuple[Path, ...] = Field(
        (), description="Folders of this machine that hold token files of the campaign; other files come from the swarm.")
    token_cache_bytes: Positive = Field(
        DEFAULT_TOKEN_CACHE_BYTES,
        description="Disk that fetched pieces of text take at most (--token-cache 16GiB); those used longest ago go first.")
    identity: Path | None = Field(None, description="Private key file of the peer's id. Default: identity.key in run_dir.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe message that is logged.")

    @property
    def identity_path(self) -> Path:
        """The private key file, whether named or the default."""
        return self.identity or self.run_dir / "identity.key"


def load_campaign_config(path: Path) -> CampaignConfig:
    """Read a campaign file. Raises UserError: one line with file, line, field, value, and what would be right."""
    file = read_yaml_mapping(path, "campaign file")
    _check_schema(file.values, str(path))
    return validated(CampaignConfig, file.values, file.where)


def parse_campaign_config(raw: Mapping[str, Any], where: str) -> CampaignConfig:
    """Validate a campaign file's content. Raises UserError naming `where`, the field and what would be right."""
    _check_schema(raw, where)
    return validated(CampaignConfig, raw, lambda location: where)


def parse_campaign(published: bytes, where: str) -> Campaign:
    """Read what a bootstrap published (`Campaign.canonical_json`). Raises UserError naming `where` it came from."""
    try:
        campaign = json.loads(published)
        _check_schema(campaign["config"], where)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where}: what it publishes is not a campaign; check the address") from None
    try:
        return validated(Campaign, campaign, lambda location: "")
    except UserError as error:
        raise UserError(f"{where}: the campaign cannot be used by this version of spes_p2p ({__version__}): "
                        f"{error}; {UPGRADE}") from None


def _check_schema(raw: Mapping[str, Any], where: str) -> None:
    """Say first that a campaign is newer than this program: its unknown fields would be said to be misspelt."""
    version = raw.get("schema_version", 1)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(f"{where}: written for schema version {version}, this version of spes_p2p ({__version__}) knows up to "
                        f"{SCHEMA_VERSION}; {UPGRADE}")


def make_peer_config(**options: object) -> PeerConfig:
    """Validate command-line options; None means that the option was not given. Raises UserError naming the option."""
    given = {name: value for name, value in options.items() if value is not None}
    return validated(PeerConfig, given, lambda location: "", _option)


def _option(location: Location) -> str:
    return f"--{str(location[0]).replace('_', '-')}"


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise broken_rule(rule, field, value)

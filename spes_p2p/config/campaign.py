"""The campaign's rules (hashed, identical on every peer) and the local settings of one peer.

A campaign file is YAML with the sections below. `docs/configuration.md` is generated from the field descriptions. Fields that
SPES also has keep SPES's names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from spes_p2p import __version__
from spes_p2p.config.model import ModelSection, with_config_json
from spes_p2p.config.problems import Location, broken_rule, validated
from spes_p2p.config.quantities import Hours, Spare
from spes_p2p.config.section import Section, require
from spes_p2p.config.types import (
    CODEC_NAMES,
    AutoOrPositive,
    CampaignName,
    CodecName,
    Count,
    Decay,
    Devices,
    DialledAddr,
    DisplayName,
    Fraction,
    IPAddress,
    Multiaddr,
    NonNegative,
    Port,
    Positive,
    PositiveNumber,
    Prompt,
    Seed,
    SourceName,
    TaskName,
    Text,
)
from spes_p2p.errors import UPGRADE, UserError
from spes_p2p.messages.fields import MAX_MEMBERS, MAX_PROMPTS

DEFAULT_TOKEN_CACHE_BYTES = 16 * 2**30
SCHEMA_VERSION = 1
"""Version of the campaign file. Omitted fields take the defaults of the file's schema version, so a default may change only
with a new version, and the default of a new field must keep the behaviour of older campaigns."""
MASKED_FAMILIES = ("ernie4_5_moe", "flex_olmo", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
"""Families whose attention is tested to stay within documents; in others, state may flow from one to the next."""
SLOWEST_LINE_BITS = 1e6
"""Below this rate, in bits per second, heartbeats queue behind a part past the timeout."""


class TrainingConfig(Section):
    """Local steps: batch, optimizer, schedule, losses."""

    sequence_length: Annotated[int, Field(strict=True, ge=2)] = Field(description="Tokens per sample.")
    batch_size: Positive = Field(le=2**20, description="Samples per local step of one peer.")
    micro_batch_size: Positive | None = Field(
        None, description="Samples per forward pass; a step accumulates gradients over them. Default: batch_size.")
    total_steps: Positive = Field(le=10**12, description="Length of the campaign and of its schedule, in campaign steps.")
    sync_steps: Positive = Field(
        description="Campaign steps between two rounds, or as many as were trained in all if those are fewer.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="Optimizer of the local steps. muon: Muon for the matrices of attention and experts, at the same "
        "learning rate and one moment instead of two; AdamW for embeddings, output head, routers and vectors. In an open "
        "campaign its momentum begins anew with each phase, so that audits can train it again.")
    learning_rate: PositiveNumber = Field(le=1e6, description="Peak learning rate.")
    embedding_lr_ratio: PositiveNumber = Field(
        1.0, description="Learning rate of the embedding and the output head, as a multiple of learning_rate.")
    warmup_steps: Count = Field(0, description="Campaign steps of linear warm-up.")
    decay_steps: Positive | None = Field(
        None, le=10**12, description="Campaign step at which the learning rate reaches its final value. Default: total_steps.")
    min_lr_ratio: Fraction = Field(0.1, description="Final learning rate of the cosine schedule, as a fraction of the peak.")
    beta1: Decay = Field(0.9, description="Decay rate of AdamW's first moment.")
    beta2: Decay = Field(0.95, description="Decay rate of AdamW's second moment.")
    second_moment_peers: AutoOrPositive = Field(
        1, description="Scale AdamW's second moment of shared weights and routers to the gradient noise of the combined batch "
        "of this many peers, whose updates are averaged. auto: number of trainers in the phase (1 with 8-bit moments).")
    eps: PositiveNumber = Field(1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(0.1, description="Decoupled weight decay.")
    decay_norm_and_bias: bool = Field(False, description="Also apply weight decay to norms and biases.")
    decay_embeddings: bool = Field(False, description="Also apply weight decay to the embeddings.")
    max_grad_norm: PositiveNumber = Field(1.0, description="Clip gradients to this global norm.")
    new_owner_ramp_steps: Count = Field(
        20, description="Local steps over which the learning rate of an expert with new moments ramps up.")
    moe_loss_weight: NonNegative = Field(
        0.01, description="Weight of the load-balancing loss (computed per layer, averaged over layers).")
    moe_zloss_weight: NonNegative = Field(0.001, description="Weight of the router z-loss.")
    lm_head_zloss_weight: NonNegative = Field(0.0, description="Weight of the z-loss on the output logits (SPES: 1e-5).")
    instance_filter: bool = Field(
        False, description="Skip samples in which a sequence of up to 13 tokens repeats 32 times in a row (OLMo's rule).")
    intra_document_masking: bool = Field(
        False, description="Let tokens attend only within their own document, which data.eos_token ends; positions restart in "
        "each, and no first token of a document is predicted. Otherwise attention crosses documents in a sample.")
    seed: Seed = Field(0, description="Seed of the data order.")

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        micro = self.micro_batch_size
        require(micro is None or self.batch_size % micro == 0, "micro_batch_size", micro,
                 f"must divide batch_size = {self.batch_size}")
        require(self.second_moment_peers == 1 or self.beta2 > 0, "second_moment_peers", self.second_moment_peers,
                 "must be 1 if beta2 = 0")
        require(self.warmup_steps < self.total_steps, "warmup_steps", self.warmup_steps,
                 f"must be less than total_steps = {self.total_steps}")
        require(self.decay_steps is None or self.warmup_steps < self.decay_steps, "decay_steps", self.decay_steps,
                 f"must be greater than warmup_steps = {self.warmup_steps}")
        require(self.total_steps % self.sync_steps == 0, "total_steps", self.total_steps,
                 f"must be a multiple of sync_steps = {self.sync_steps}")
        return self


class ExpertsConfig(Section):
    """Assignment of experts to trainers."""

    experts_per_peer: Positive | None = Field(
        None, description="Maximum number of experts one peer trains. Default: as many as needed to train all.")
    redundancy: Positive = Field(1, le=MAX_MEMBERS, description="Owners per expert, capacity permitting.")


class MergeConfig(Section):
    """SPES's expert-merging warm-up, applied after a round.

    `w <- w + alpha (mean(donors) - w)`, `alpha = merge_alpha_start * max(0, 1 - step / merge_decay_steps)` (arXiv 2602.11543).
    """

    merge_interval: Positive | None = Field(
        None, description="Campaign steps between two merges, a multiple of sync_steps. Default: never merge.")
    merge_alpha_start: Fraction = Field(0.1, description="Alpha at step 0.")
    merge_decay_steps: Positive = Field(1000, description="Campaign step at which alpha reaches 0.")
    merge_top_k: Positive = Field(
        4, description="Donors per expert: the most similar other experts. The plan of a round names them, so experts are "
        "compared before the round; SPES compares them after it, which made no difference in a small model "
        "(docs/comparison.md).")


class CodecConfig(Section):
    """Codecs of the updates, by kind of weights. One codec name in place of this section sets all three.

    What a codec drops stays with the sender and is added to its next update (error feedback). `sparse16`, `sparse` and
    `sparse64` send one of 16, 32 or 64 values a round: for experts whose owners stay (docs/communication.md). In the last round
    `int4` takes the place of these and of `ternary`.
    """

    router: CodecName = Field("none", description="Codec of the router matrices. They are small, and rounding reroutes tokens.")
    shared: CodecName = Field(
        "int4", description="Codec of the other shared weights: of each peer's update and of the reducers' means.")
    experts: CodecName = Field("int4", description="Codec of the experts.")

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        if isinstance(value, str):
            if value not in CODEC_NAMES:
                raise broken_rule(f"must be one of {', '.join(CODEC_NAMES)}, or a section with router, shared and experts")
            return dict.fromkeys(cls.model_fields, value)
        return value


class OuterConfig(Section):
    """The outer step, which applies a round's mean update to the base.

    `m <- momentum * m + update; w <- w + learning_rate * (update + momentum * m)`. The defaults average, as SPES does.
    """

    shared_learning_rate: PositiveNumber = Field(1.0, description="Outer learning rate of the shared weights.")
    shared_momentum: Decay = Field(
        0.0, description="Nesterov momentum of the shared weights. A nonzero value adds their momentum to the base.")
    router_learning_rate: PositiveNumber = Field(1.0, description="Outer learning rate of the routers.")
    router_momentum: Decay = Field(0.0, description="Nesterov momentum of the routers.")
    experts_learning_rate: PositiveNumber = Field(1.0, description="Outer learning rate of the experts.")
    experts_momentum: Decay = Field(
        0.0, description="Nesterov momentum of the experts. A nonzero value adds the momentum of all experts to the base.")


class SyncConfig(Section):
    """Rounds: codecs and timeouts."""

    codec: CodecConfig = Field(
        CodecConfig(), description="Codecs of the updates: one name for all kinds of weights, or a section (below).")
    overlap: bool = Field(
        False, description="Continue training during a round. It is applied at the end of the phase that it overlaps, so "
        "updates are one phase late: round 1 moves no weights, and the campaign has one more round.")
    bound_influence: bool = Field(
        True, description="Clamp members' claims to what they were assigned, and clip updates to a few medians, "
        "so that one peer cannot move the model far. false is for comparisons.")
    audited_share: Fraction = Field(
        0.02, description="Share of the phases of peers for whom the owner does not vouch that vouched trainers train again, "
        "to check that they were trained (`admission: open` only). Each costs its auditor as many steps, all of them at most "
        "ten times this share of its own. 0: none.")
    min_peers: Count = Field(
        1, le=MAX_MEMBERS, description="Trainers required before the first round is planned; with `admission: open`, the owner "
        "must vouch for one of them, and only rounds with work of such trainers advance the schedule. 0 (only there): "
        "strangers suffice.")
    join_grace_s: NonNegative = Field(
        5.0, description="Seconds that the first round waits for more trainers once min_peers are present.")
    silence_s: Annotated[float, Field(strict=True, ge=1)] = Field(
        10.0, description="Seconds of silence after which a peer counts as lost. Heartbeats adapt the bound downwards.")
    reform_after_s: PositiveNumber = Field(
        60.0, description="Seconds without a majority of the electors, or without a peer that has the newest base, after which "
        "the bootstrap peer reforms the swarm.")


class EvaluationConfig(Section):
    """Held-out loss, tasks and samples of the model's text during training."""

    every_rounds: Count = Field(5, description="Evaluate on the held-out text every this many rounds; 0: never.")
    max_samples: Positive = Field(64, description="Maximum number of held-out samples.")
    tasks: tuple[TaskName, ...] = Field(
        (), max_length=32,
        description="lm-eval tasks that peers with --evaluate-tasks run every every_rounds rounds, each with "
        "its few-shot examples or its own number: [arc_easy, piqa:5].")
    max_examples: Positive = Field(500, description="Maximum number of examples per task.")
    prompts: tuple[Prompt, ...] = Field(
        (), max_length=MAX_PROMPTS,
        description="Beginnings of texts, at most four, which peers with --evaluate-tasks have the model continue every "
        "every_rounds rounds: 40 tokens, the likeliest each time. Dashboard and report show what it writes.")

    @model_validator(mode="after")
    def _check(self) -> EvaluationConfig:
        require(self.every_rounds > 0 or not (self.tasks or self.prompts), "every_rounds", 0,
                 "must be greater than 0 if there are tasks or prompts")
        return self


class SourceConfig(Section):
    """One source of training text, instead of data.manifest: a list of them, each with a share of the samples.

    Every prefix of the order in which samples are handed out has each source's share, within one sample. A source that has
    been read starts over in another order, independently of the others.
    """

    name: SourceName = Field(description="Name of the source.")
    manifest: Text = Field(description="Path of its manifest, relative to the campaign file.")
    weight: PositiveNumber = Field(description="Its share of the samples, relative to the other sources' weights.")


class DataConfig(Section):
    """Token files. Peers get manifests, tokenizer and pieces from the swarm, and pieces that no peer serves from the URL in the
    manifest (`--url` of `spes-p2p tokenize`)."""

    manifest: Text | None = Field(
        None, description="Path of the training manifest that `spes-p2p tokenize` writes, relative to the campaign file. "
        "Required unless train is given.")
    train: tuple[SourceConfig, ...] = Field(
        (), max_length=64, description="Several sources of training text with weights, instead of manifest.")
    validation_manifest: Text | None = Field(None, description="Path of the manifest of the held-out token files.")
    tokenizer: Text = Field(description="Path of the tokenizer.json, relative to the campaign file.")
    eos_token: Text = Field("<|endoftext|>", description="Token that ends each document.")
    pad_token: Text | None = Field(None, description="Padding token of the exported tokenizer. Default: eos_token.")

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        require(self.manifest is not None or bool(self.train), "manifest", self.manifest,
                 "must name the training manifest, unless train lists sources")
        require(self.manifest is None or not self.train, "manifest", self.manifest, "stands beside train; keep one of them")
        names = [source.name for source in self.train]
        require(len(set(names)) == len(names), "train", names, "must name each source differently")
        return self


StartFile = Literal["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"]


class StartConfig(Section):
    """Existing weights for base 0, which is random without this section. Only the bootstrap peer reads the checkpoint."""

    checkpoint: Text = Field(
        description="Hugging Face checkpoint: a folder, relative to the campaign file, or a Hub name, OWNER/NAME@REVISION.")
    upcycle: Literal["copy", "drop", "spes"] | None = Field(
        None, description="Rule by which a dense checkpoint becomes experts (docs/upcycling.md): copies of the MLP (copy), in "
        "each of which half of the neurons are drawn anew (drop), or half of the weights get noise as in SPES's script (spes).")
    files: tuple[StartFile, ...] = Field(
        (), description="Further files of the checkpoint, next to the campaign file. Peers carry them, and export writes them "
        "back: the chat template, special tokens, sampling and end tokens of generation.")


class CampaignConfig(Section):
    """One training run, identical on every peer: `Campaign.hash` covers it."""

    schema_version: Positive = Field(
        1, description="Version of the file format; it fixes the defaults of omitted fields.")
    name: CampaignName = Field(description="Name of the campaign: 1 to 63 letters, digits, '.', '_' or '-'.")
    admission: Literal["friends", "invite", "open"] = Field(
        "friends", description="Who may take part. friends: any peer that can connect, also as an elector. invite: peers "
        "with an invitation of the owner (`spes-p2p invite`), in the roles that it names. open: any peer may train, on "
        "probation at first; electors and helpers need an invitation (docs/admission.md).")
    model: ModelSection
    start: StartConfig | None = Field(None, description="Existing weights for base 0.")
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
        require(length <= longest, "training.sequence_length", length,
                 f"must be at most model.max_position_embeddings = {longest}")
        require(not self.training.intra_document_masking or self.model.architecture in MASKED_FAMILIES,
                 "training.intra_document_masking", True,
                 f"must be false for {self.model.architecture}; possible for {', '.join(MASKED_FAMILIES)}")
        per_peer, experts = self.experts.experts_per_peer, self.model.moe_num_experts
        require(per_peer is None or per_peer <= experts, "experts.experts_per_peer", per_peer,
                 f"must be at most model.moe_num_experts = {experts}")
        interval, sync = self.merge.merge_interval, self.training.sync_steps
        require(interval is None or interval % sync == 0, "merge.merge_interval", interval,
                 f"must be a multiple of training.sync_steps = {sync}")
        require(self.sync.min_peers > 0 or self.admission == "open", "sync.min_peers", 0,
                 f"must be greater than 0 with admission: {self.admission}")
        return self

    @property
    def total_rounds(self) -> int:
        """Number of the last round. Round 0 only assembles the swarm; with overlap, round 1 moves no weights either."""
        return self.training.total_steps // self.training.sync_steps + self.sync.overlap


class Campaign(Section):
    """What the bootstrap peer publishes: the config and the hashes of the files it names. Its hash identifies the campaign."""

    config: CampaignConfig
    manifest_sha256: str
    validation_manifest_sha256: str | None
    tokenizer_sha256: str
    start_files_sha256: str | None = None
    """Of `start.files`, in one; not set without any, as in campaigns that are older than them."""

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the canonical JSON; peers with different hashes refuse each other.

        Covers only fields that the owner set, so a release that adds a field with a default changes no campaign's hash.
        """
        return hashlib.sha256(self.canonical_json()).hexdigest()

    def canonical_json(self) -> bytes:
        """Return the bytes that are hashed and published."""
        written = self.model_dump(mode="json", exclude_unset=True)
        return json.dumps(written, sort_keys=True, separators=(",", ":")).encode()


class PeerConfig(Section):
    """Local settings of one peer. They may change from start to start."""

    run_dir: Path = Field(description="Folder for the peer's state; a restart with the same folder continues.")
    devices: Devices = Field(
        "auto", description="Devices to train on: auto (the first GPU, or the CPU), cpu, all (every GPU), or numbers of GPUs, "
                            "which divide each batch: 0,1,2,3. cpu,cpu is two processes on the CPU.")
    experts: AutoOrPositive = Field(
        "auto", description="Maximum number of experts to train; auto: as many as fit in memory.")
    memory_bytes: Positive | None = Field(
        None, description="Memory budget of the device for experts = auto (--memory 12GiB). Default: all free memory.")
    leave_free: Annotated[Spare, WithJsonSchema({"type": "string"})] | None = Field(
        None, description="Memory of each device that experts = auto leaves to other programs, beside the usual reserve "
                          "(--leave-free 20% or 2GiB). Default: none.")
    nice: Annotated[int, Field(strict=True, ge=0, le=19)] = Field(
        0, description="Niceness of the threads that train and compute: 19 gives way to everything else. What sends and "
                       "receives keeps its priority, so rounds do not wait for it.")
    stored: Literal["auto", "fp32", "bf16", "int8"] = Field(
        "auto", description="Format of the experts of other peers; auto, here and below: what allows most experts, at the "
        "least estimated cost in speed (docs/memory.md).")
    stored_on: Literal["auto", "device", "host"] = Field(
        "auto", description="Memory that holds the experts of other peers. host copies each layer twice per forward pass.")
    backend: Literal["auto", "grouped_mm", "eager", "megablocks"] = Field(
        "auto", description="Expert kernels; auto: grouped_mm if the sizes allow it, otherwise eager.")
    optimizer: Literal["auto", "adamw", "adamw8bit"] = Field(
        "auto", description="Moments in float32, or in 8 bits (needs torchao).")
    compile: Literal["auto", "off"] = Field(
        "auto", description="Compile the layers outside the experts, and attention between masked documents (FlexAttention); "
        "use FlashAttention where it is installed. auto: on a GPU, each where a trial before the first step agrees with the "
        "form without it and is faster; not where devices divide the layers.")
    activation_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass: less memory, about a third more time. Default: as auto.")
    sharding: bool | None = Field(
        None, description="Divide the layers among several devices, which send them to each other in each pass. Default: where "
                          "that trains more experts per second.")
    micro_batch_size: Positive | None = Field(
        None, description="Samples per forward pass on this machine. Default: as auto, at most the campaign's.")
    checkpoint: Path | None = Field(
        None, description="Folder of the checkpoint that the campaign started from (--from), if this machine has it: a new "
                          "peer of a young campaign makes base 0 from it and downloads none. Default: the Hub's cache.")
    base: Literal["auto", "disk", "ram"] = Field(
        "auto", description="Where to keep bases and the data of a round: in memory-mapped files, which are written every "
                            "round, or in memory, several times 4 bytes per value (--base ram). auto: in memory where half of "
                            "what is free suffices, for both or for the data of a round.")
    checkpoint_minutes: NonNegative = Field(
        10.0, description="Minutes between two checkpoints of this peer's work, also within a phase: what a crash may lose. 0: "
                          "after each round.")
    archive_every: Count = Field(
        50, description="Rounds between two bases that a bootstrap peer archives; 0: none.")
    archive_keep: Positive = Field(2, description="Number of archived bases; each takes as much disk as a base.")
    metrics_port: Port | None = Field(None, description="Port of the Prometheus metrics; 0: any free port. Default: none.")
    metrics_host: IPAddress = Field(
        "127.0.0.1", description="Address to serve the metrics on. Access is not restricted.")
    tracker: Literal["none", "wandb", "trackio"] = Field(
        "none", description="Experiment tracker that records this peer's metrics once per round; must be installed.")
    listen: tuple[Multiaddr, ...] = Field(
        (), description="Addresses to listen on. Default: any free TCP port on every interface.")
    max_upload: Annotated[float, Field(ge=SLOWEST_LINE_BITS)] | None = Field(
        None, description="Upload limit in bits per second (--max-upload 20mbit). Default: no limit.")
    max_download: Annotated[float, Field(ge=SLOWEST_LINE_BITS)] | None = Field(
        None, description="Download limit in bits per second (--max-download 50mbit). Default: no limit.")
    announce: tuple[DialledAddr, ...] = Field(
        (), description="Addresses that other peers dial, for use behind NAT. Default: the addresses listened on.")
    data_dir: tuple[Path, ...] = Field(
        (), description="Local folders with token files of the campaign; missing files come from the swarm.")
    private_urls: bool = Field(
        False, description="Read token files also from URLs in this machine's local network (--private-urls).")
    token_cache_bytes: Positive = Field(
        DEFAULT_TOKEN_CACHE_BYTES,
        description="Maximum disk space for downloaded text (--token-cache 16GiB); least recently used pieces are evicted.")
    hours: Annotated[Hours, WithJsonSchema({"type": "string"})] | None = Field(
        None, description="Hours of the day, local time, in which this trainer runs (--hours 22-8); it pauses in others. "
                          "Default: all.")
    only_when_idle: bool = Field(
        False, description="Pause while other programs use this machine's CPU or GPUs, and on battery (--only-when-idle).")
    quota: Positive | None = Field(
        None, description="Bytes that this trainer may send and receive in a day, local time (--quota 20GB/day). It pauses when"
                          " what is left does not suffice for another round. Default: no limit.")
    evaluate_tasks: bool = Field(
        False, description="Run the campaign's evaluation.tasks and continue its evaluation.prompts on this machine's CPU, in "
                           "a process of lowest priority (--evaluate-tasks).")
    include_path: Path | None = Field(
        None, description="Folder with task definitions for --evaluate-tasks; lm-eval's own are known without it.")
    name: DisplayName | None = Field(
        None, description="What lists of contributors call this peer (--name). Anybody may choose any name, so its id stands "
                          "beside it. Default: only the id.")
    team: DisplayName | None = Field(
        None, description="Team whose sum this peer's tokens count for in these lists (--team). Anybody may join any team.")
    invite: Text | None = Field(
        None, description="Invitation of the campaign's owner: the text, or a file with it. Kept in run_dir for later starts.")
    identity: Path | None = Field(None, description="Private key file of the peer. Default: identity.key in run_dir.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum severity of logged messages.")

    @property
    def identity_path(self) -> Path:
        """Path of the private key."""
        return self.identity or self.run_dir / "identity.key"


def load_campaign_config(path: Path) -> CampaignConfig:
    """Read a campaign file. Raises UserError naming file, line, field, value and the valid values."""
    from spes_p2p.config.yaml_file import read_yaml_mapping  # clients get campaigns as JSON

    file = read_yaml_mapping(path, "campaign file")
    if 2 * len(file.values.keys() & CampaignConfig.model_fields.keys()) < len(file.values):
        raise UserError(f"{path}: no campaign file: most of its fields belong in none; give the one that spes-p2p init wrote")
    _check_schema(file.values, str(path))
    values = with_config_json(file.values, path.parent, file.where(("model", "config")))
    return validated(CampaignConfig, values, file.where)


def parse_campaign_config(raw: Mapping[str, Any], where: str) -> CampaignConfig:
    """Validate the content of a campaign file. Raises UserError naming `where`, the field and the valid values."""
    _check_schema(raw, where)
    return validated(CampaignConfig, raw, lambda location: where)


def parse_campaign(published: bytes, where: str) -> Campaign:
    """Parse a published campaign (`Campaign.canonical_json`). Raises UserError naming `where` it came from."""
    try:
        campaign = json.loads(published)
        _check_schema(campaign["config"], where)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{where}: does not publish a campaign; check the address") from None
    try:
        return validated(Campaign, campaign, lambda location: "")
    except UserError as error:
        raise UserError(f"{where}: the campaign cannot be used by this version of spes_p2p ({__version__}): "
                        f"{error}; to upgrade, {UPGRADE}") from None


def _check_schema(raw: Mapping[str, Any], where: str) -> None:
    """Reject a newer schema before validation would report its new fields as misspelt."""
    version = raw.get("schema_version", 1)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(f"{where}: has schema version {version}, but this version of spes_p2p ({__version__}) supports up to "
                        f"{SCHEMA_VERSION}; to upgrade, {UPGRADE}")


def make_peer_config(**options: object) -> PeerConfig:
    """Validate command-line options; None: not given. Raises UserError naming the option."""
    given = {name: value for name, value in options.items() if value is not None}
    return validated(PeerConfig, given, _option)


def _option(location: Location) -> str:
    return f"--{str(location[0]).replace('_', '-')}"

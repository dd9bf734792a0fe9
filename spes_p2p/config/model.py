"""The model section of a campaign: a transformers `config.json`, whole, or a few fields that stand for one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from spes_p2p.config.problems import broken_rule
from spes_p2p.config.section import Section, require
from spes_p2p.config.types import Count, NonNegative, PositiveNumber, Seed
from spes_p2p.errors import UserError
from spes_p2p.messages.fields import MAX_EXPERTS, MAX_LAYERS

CONFIG_JSON = "config.json"
"""File of a model's configuration, in a checkpoint and beside a campaign file."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that model families give the number of experts in a layer."""
PEERS_CHOICE = ("attn_implementation", "experts_implementation")
"""Computation is each peer's own choice; with these keys transformers would even download code from the Hub."""
MAX_SIZE, MAX_VOCABULARY, MAX_POSITIONS = 2**20, 2**25, 2**24
"""Bound a model's widths, its vocabulary and its sequence length, well above the largest published ones: a volunteer builds the
shapes of a stranger's model to find out what fits."""
MAX_NUMBER, MAX_DEPTH = 2**53, 16
"""Bound all other whole numbers of a `config.json`, and its nesting."""
MAX_BLOCKS = 2**16
"""Experts of all layers. Each takes some hundred bytes of the layout; published models have some ten thousand."""

Size = Annotated[int, Field(strict=True, gt=0, le=MAX_SIZE)]
Vocabulary = Annotated[int, Field(strict=True, gt=0, le=MAX_VOCABULARY)]
Positions = Annotated[int, Field(strict=True, gt=0, le=MAX_POSITIONS)]
Layers = Annotated[int, Field(strict=True, gt=0, le=MAX_LAYERS)]
Experts = Annotated[int, Field(strict=True, gt=0, le=MAX_EXPERTS)]
_BOUNDS = {
    "layers": MAX_LAYERS, "experts": MAX_EXPERTS, "vocab_size": MAX_VOCABULARY, "position": MAX_POSITIONS,
    "size": MAX_SIZE, "dim": MAX_SIZE, "rank": MAX_SIZE, "heads": MAX_SIZE, "layer": MAX_LAYERS, "blocks": MAX_LAYERS,
    "depth": MAX_LAYERS, "stage": MAX_LAYERS, "codebooks": MAX_LAYERS,
}  # fmt: skip
"""By a part of a name in a `config.json`; the first one counts."""


class _Common(Section):
    """What does not follow from a checkpoint's `config.json`."""

    moe_low_rank: Count = Field(
        0, description="Rank of a low-rank term added to each expert's matrices. It is a shared weight, so all peers "
        "train it; export folds it into the experts. 0 disables it; otherwise a multiple of 8.")
    seed: Seed = Field(0, description="Seed of the initial weights, which the bootstrap peer creates once.")
    init_cutoff_factor: Annotated[float, Field(strict=True, ge=0.1)] | None = Field(
        None, description="Draw initial matrices from a normal distribution that is cut off at this many standard "
        "deviations (SPES: 3). Default: not cut off.")

    @model_validator(mode="after")
    def _check_rank(self) -> _Common:
        require(self.moe_low_rank % 8 == 0, "moe_low_rank", self.moe_low_rank, "must be a multiple of 8")
        return self


class ModelConfig(_Common):
    """Shape of the mixture-of-experts model: the short form of a `config.json`."""

    architecture: Literal["olmoe", "qwen3_moe"] = Field("olmoe", description="Model class in transformers.")
    vocab_size: Vocabulary = Field(description="Rows of the embedding matrix; at least the tokenizer's vocabulary size.")
    hidden_size: Size = Field(description="Width of the residual stream.")
    intermediate_size: Size = Field(description="Width of one expert's hidden layer.")
    num_hidden_layers: Layers = Field(description="Number of transformer layers.")
    num_attention_heads: Size = Field(description="Number of attention heads.")
    num_key_value_heads: Size = Field(
        description="Number of key/value heads; fewer than attention heads: grouped-query attention.")
    max_position_embeddings: Positions = Field(description="Maximum sequence length of the model, in tokens.")
    moe_num_experts: Experts = Field(description="Experts per layer.")
    moe_top_k: Experts = Field(description="Experts that each token is routed to.")
    norm_topk_prob: bool = Field(False, description="Scale the top-k router probabilities to sum to 1.")
    rope_theta: PositiveNumber = Field(10000.0, description="Base of the rotary embedding.")
    tie_word_embeddings: bool = Field(False, description="Use the embedding matrix as output head.")
    initializer_range: NonNegative = Field(0.02, description="Standard deviation of the initial weights.")
    rms_norm_eps: PositiveNumber | None = Field(
        None, description="Epsilon of the norms. Default: that of the architecture in transformers, 1e-5 for olmoe and 1e-6 "
        "for qwen3_moe.")

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        _check_blocks("moe_num_experts", self.moe_num_experts, self.num_hidden_layers)
        require(self.moe_top_k <= self.moe_num_experts, "moe_top_k", self.moe_top_k,
                f"must be at most moe_num_experts = {self.moe_num_experts}")
        require(self.moe_low_rank <= min(self.hidden_size, self.intermediate_size), "moe_low_rank", self.moe_low_rank,
                "must be at most hidden_size and intermediate_size")
        require(self.hidden_size % (2 * self.num_attention_heads) == 0, "hidden_size", self.hidden_size,
                f"must be a multiple of twice num_attention_heads = {self.num_attention_heads}")
        require(self.num_attention_heads % self.num_key_value_heads == 0, "num_key_value_heads", self.num_key_value_heads,
                f"must divide num_attention_heads = {self.num_attention_heads}")
        return self

    @property
    def config_json(self) -> dict[str, Any]:
        """The transformers configuration that these fields stand for."""
        written: dict[str, Any] = {
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "num_experts": self.moe_num_experts,
            "num_experts_per_tok": self.moe_top_k,
            "norm_topk_prob": self.norm_topk_prob,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "eos_token_id": None,
        }
        if self.rms_norm_eps is not None:
            written["rms_norm_eps"] = self.rms_norm_eps
        if self.architecture == "qwen3_moe":
            written["moe_intermediate_size"] = self.intermediate_size
            written["head_dim"] = self.hidden_size // self.num_attention_heads
        return written


class TransformersModel(_Common):
    """Any mixture-of-experts model of transformers whose experts are plain: instead of the fields above, its `config.json`."""

    config: dict[str, Any] = Field(
        description="A transformers config.json: its content, or its path relative to the campaign file. Published whole.")

    @model_validator(mode="before")
    @classmethod
    def _stands_alone(cls, value: object) -> object:
        for name, other in value.items() if isinstance(value, dict) else ():
            if name not in cls.model_fields and name in ModelConfig.model_fields:
                raise broken_rule("stands beside config; a model section has config or these fields", name, other)
        return value

    @field_validator("config", mode="after")
    @classmethod
    def _check_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings", _experts_key(config)):
            if not _is_positive(config.get(name)):
                raise broken_rule("must be a whole number greater than 0", name, config.get(name))
        _check_sizes(config)
        _check_blocks(_experts_key(config), config[_experts_key(config)], config["num_hidden_layers"])
        if not isinstance(config.get("model_type"), str):
            raise broken_rule("must name a family of transformers", "model_type", config.get("model_type"))
        if config.get("quantization_config"):
            raise broken_rule("quantised weights cannot be trained; start from the unquantised checkpoint",
                              "quantization_config", "...")
        for name in config:
            if name.lstrip("_").startswith(PEERS_CHOICE):
                raise broken_rule("is each peer's own choice; remove it", name, config[name])
        try:
            json.dumps(config, allow_nan=False, ensure_ascii=False).encode()
        except ValueError:
            raise broken_rule("must be plain JSON, without infinite numbers or half characters") from None
        return config

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def config_json(self) -> dict[str, Any]:
        """The transformers configuration."""
        return self.config

    @property
    def architecture(self) -> str:
        """Family of the model in transformers."""
        return str(self.config["model_type"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        return int(self.config["vocab_size"])

    @property
    def num_hidden_layers(self) -> int:
        """Number of transformer layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length, in tokens."""
        return int(self.config["max_position_embeddings"])

    @property
    def moe_num_experts(self) -> int:
        """Experts per layer."""
        return int(self.config[_experts_key(self.config)])


def _form(value: object) -> str:
    """Return the tag of the form that a model section has."""
    whole = isinstance(value, TransformersModel) or (isinstance(value, dict) and "config" in value)
    return "<config>" if whole else "<fields>"


ModelSection = Annotated[
    Annotated[ModelConfig, Tag("<fields>")] | Annotated[TransformersModel, Tag("<config>")], Discriminator(_form)
]
"""Both forms; `config_json` is what transformers builds the model from."""


def with_config_json(values: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Return a campaign file's values with the content of the `config.json` that `model.config` names, if it names one.

    Raises UserError, beginning with `where`, if the file cannot be read.
    """
    model = values.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("config"), str):
        return dict(values)
    return {**values, "model": {**model, "config": read_config_json(folder / model["config"], f"{where}: model.config = ")}}


def read_config_json(path: Path, where: str = "") -> dict[str, Any]:
    """Return the content of a `config.json`. Raises UserError."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{where}{path}: cannot be read ({error.strerror}); name a transformers config.json") from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{where}{path}: not a transformers config.json; copy it again from the checkpoint")
    return config


def _experts_key(config: Mapping[str, Any]) -> str:
    return next((name for name in NUM_EXPERTS if name in config), NUM_EXPERTS[0])


def _check_blocks(name: str, experts: int, layers: int) -> None:
    if experts * layers > MAX_BLOCKS:
        raise broken_rule(f"must be at most {MAX_BLOCKS // layers} in each of {layers} layers", name, experts)


def _check_sizes(value: object, name: str = "", depth: int = 0) -> None:
    """Bound the sizes in a `config.json`, at any depth, by their names: those of all families have these parts."""
    if depth > MAX_DEPTH:
        raise broken_rule(f"must be nested at most {MAX_DEPTH} deep", name, "...")
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else ((name, each) for each in value):
            _check_sizes(each, key, depth + 1)
        return
    most = next((most for part, most in _BOUNDS.items() if part in name), MAX_NUMBER)
    if isinstance(value, int) and value > most:
        raise broken_rule(f"must be at most {most}", name, value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

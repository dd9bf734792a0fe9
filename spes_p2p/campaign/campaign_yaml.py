"""The commented campaign file of a new campaign."""

from __future__ import annotations

import json

from spes_p2p.campaign.answers import (
    OUTER_FROM_STEPS,
    RANDOM_ALPHA,
    ROUNDS_AT_LEAST,
    SIZES,
    UPCYCLED_ALPHA,
    Answers,
    Schedule,
    make_schedule,
)
from spes_p2p.config.campaign import SCHEMA_VERSION
from spes_p2p.data.manifest import MANIFEST_NAME
from spes_p2p.observe.units import counted

TOKENIZER_JSON, TOKENS_FOLDER = "tokenizer.json", "tokens"
TRAIN, HELD_OUT = "train_", "held_out_"


def campaign_yaml(answers: Answers, vocab_size: int, tokens: int) -> str:
    """Return the campaign file, with comments on the settings that an owner may want to change."""
    recipe = answers.recipe
    schedule = make_schedule(recipe, tokens, answers.peers, answers.epochs)
    passes = f"{schedule.total_steps * answers.peers * recipe.batch_size * recipe.sequence_length / tokens:.3g}"
    held_out = f"{TOKENS_FOLDER}/{HELD_OUT}{MANIFEST_NAME}"
    return _TEMPLATE.format(
        schema_version=SCHEMA_VERSION,
        name=json.dumps(answers.name),
        admission=answers.admission,
        model=_model_yaml(answers, vocab_size),
        merge=_merge_yaml(answers, schedule),
        outer=_outer_yaml(answers),
        tokens=tokens,
        peers=answers.peers,
        recipe=recipe,
        optimizer=_OPTIMIZER[recipe.optimizer],
        micro_batch_size=_MICRO_BATCH[recipe.micro_batch_size is None].format(recipe=recipe),
        schedule=schedule,
        training_text=_training_text_yaml(answers),
        validation=f"validation_manifest: {held_out}" if answers.held_out else f"# validation_manifest: {held_out}",
        tokenizer=TOKENIZER_JSON,
        passes="1 pass" if passes == "1" else f"{passes} passes",
        with_peers=counted(answers.peers, "peer"),
        rounds=ROUNDS_AT_LEAST,
        eos_token="" if answers.start is None else f"\n  eos_token: {json.dumps(answers.start.eos_token)}",
        codec=answers.codec,
        sync_tokens=recipe.sync_steps * recipe.batch_size * recipe.sequence_length,
    )


def _model_yaml(answers: Answers, vocab_size: int) -> str:
    """Return the model section, and with existing weights the section that names them."""
    start = answers.start
    if start is None:
        return _MODEL.format(vocab_size=vocab_size, rows=-(-vocab_size // 64) * 64, size=SIZES[answers.size])
    rule = f"\n  upcycle: {start.upcycle}  # how the dense model becomes experts: copy, drop or spes" if start.upcycle else ""
    names = f"\n  files: [{', '.join(path.name for path in start.files)}]  # export writes them back" if start.files else ""
    return _START.format(architecture=start.model.architecture, checkpoint=json.dumps(start.checkpoint), rule=rule, names=names)


def _training_text_yaml(answers: Answers) -> str:
    served = "served by peers" if answers.url is None else f"publish this folder at {answers.url}"
    if not answers.sources:
        return f"manifest: {TOKENS_FOLDER}/{TRAIN}{MANIFEST_NAME}  # the training text: {served}"
    lines = [f"train:  # the training text, with each source's share of the samples: {served}"]
    for source in answers.sources:
        manifest = f"{TOKENS_FOLDER}/{source_prefix(source.name)}{MANIFEST_NAME}"
        lines.append(f"    - {{name: {json.dumps(source.name)}, weight: {source.weight:g}, manifest: {manifest}}}")
    return "\n".join(lines)


def source_prefix(name: str) -> str:
    """Return the prefix of a source's token files."""
    return f"{TRAIN}{name}_"


def _merge_yaml(answers: Answers, schedule: Schedule) -> str:
    """Return the merge section. Experts of a checkpoint differ for good reason, so they are not merged."""
    if answers.start is not None and answers.start.upcycle is None:
        return ""
    alpha = RANDOM_ALPHA if answers.start is None else UPCYCLED_ALPHA
    return _MERGE.format(schedule=schedule, alpha=alpha)


def _outer_yaml(answers: Answers) -> str:
    """Return the outer section, for long phases from random weights. It was measured beside a slow beta2 only."""
    if answers.start is not None or answers.recipe.sync_steps < OUTER_FROM_STEPS:
        return ""
    return _OUTER.format(steps=OUTER_FROM_STEPS, mark="" if answers.recipe.beta2 > 0.99 else "# ")


_TEMPLATE = """\
# Campaign file of spes-p2p. Volunteers get it from the swarm, so it is identical on every peer. docs/configuration.md lists
# all fields and their defaults. After a bootstrap peer has started with this file, any change makes it another campaign.
schema_version: {schema_version}  # fixes the defaults of omitted fields
name: {name}
admission: {admission}  # who may take part: docs/admission.md

{model}
training:
  sequence_length: {recipe.sequence_length}
  batch_size: {recipe.batch_size}  # samples per local step of one peer
  {micro_batch_size}
  total_steps: {schedule.total_steps}  # {passes} over {tokens} tokens with {with_peers}; at least {rounds} rounds
  sync_steps: {recipe.sync_steps}  # steps between two rounds: {sync_tokens} tokens per peer; increase it for slow links
  {optimizer}
  learning_rate: {recipe.learning_rate}
  embedding_lr_ratio: {recipe.embedding_lr_ratio}  # learning rate of embedding and output head, as a multiple of learning_rate
  beta2: {recipe.beta2}  # with slow decay, the mean of the peers' steps is close to a step along their mean gradient
  warmup_steps: {schedule.warmup_steps}
  # intra_document_masking: true  # tokens attend only within their own document

{merge}{outer}sync:
  min_peers: {peers}  # trainers that the first round waits for; later rounds take the trainers that are present
  codec: {{router: {codec.router}, shared: {codec.shared}, experts: {codec.experts}}}  # what they drop is sent later

evaluation:
  every_rounds: 10  # evaluate on the held-out text every 10 rounds
  # prompts: ["Once upon a time", "The house"]  # the dashboard shows how the model continues them over the rounds

data:  # paths are relative to this file
  {training_text}
  {validation}
  tokenizer: {tokenizer}{eos_token}
"""

_OPTIMIZER = {
    "muon": "optimizer: muon  # for the matrices of attention and experts; from random weights a lower loss than with adamw",
    "adamw": "# second_moment_peers: auto  # a slightly lower loss, closer to training on one large machine",
}

_MICRO_BATCH = {
    False: "micro_batch_size: {recipe.micro_batch_size}  # samples per forward pass; a volunteer can choose a smaller one",
    True: "# micro_batch_size: 1  # at most so many samples per forward pass; by default as many as fit a volunteer's memory",
}

_START = """\
model:
  config: config.json  # of the model ({architecture}), whole; paths are relative to this file
  # moe_low_rank: 16  # adds to each expert a low-rank term that every peer trains: docs/learning.md

start:  # existing weights; only the bootstrap peer reads them
  checkpoint: {checkpoint}{rule}{names}
"""

_MERGE = """\
merge:  # merge similar experts slightly in the first part of training (SPES)
  merge_interval: {schedule.merge_interval}
  merge_alpha_start: {alpha}
  merge_decay_steps: {schedule.merge_decay_steps}

"""

_OUTER = """\
# Updates are mostly noise, and momentum adds up what rounds have in common. With {steps} steps a phase and more it lowered
# the loss by 0.012 to 0.031 (measured in models of up to 4M parameters, with beta2 0.999): docs/learning.md.
{mark}outer: {{shared_learning_rate: 0.9, shared_momentum: 0.5}}

"""

_MODEL = """\
model:
  architecture: olmoe
  vocab_size: {rows}  # the tokenizer's {vocab_size} ids, rounded up to a multiple of 64
  hidden_size: {size.hidden_size}
  intermediate_size: {size.intermediate_size}  # width of one expert
  num_hidden_layers: {size.num_hidden_layers}
  num_attention_heads: {size.num_attention_heads}
  num_key_value_heads: {size.num_attention_heads}
  max_position_embeddings: {size.sequence_length}
  moe_num_experts: {size.moe_num_experts}  # divided among the peers; each trains as many as fit in its memory
  moe_top_k: {size.moe_top_k}  # experts that each token is routed to
  # moe_low_rank: 16  # adds to each expert a low-rank term that every peer trains: docs/learning.md
"""

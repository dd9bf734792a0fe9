"""Whether this program trains a model family right. What it cannot compute is refused by name before anything is written."""

from __future__ import annotations

from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.build import empty_model, layout_of
from spes_p2p.model.file_format import file_tensors

SCALED_LOGITS = (
    "logits_scaling", "logit_scale", "final_logit_softcapping", "logits_mup_width_multiplier", "unpadded_vocab_size",
)
"""Settings by which a family changes its logits after the output head."""
RANDOM = ("dropout", "jitter")
"""What the names of settings contain by which a family draws random numbers in training."""


def check_family(model: ModelSection) -> None:
    """Raise UserError unless the family's experts, routers, output head and file format are those that training supports."""
    empty, layout = empty_model(model), layout_of(model)
    family = f"model_type = {model.architecture!r}"
    if layout.num_experts != model.moe_num_experts:
        raise UserError(f"{family}: its layers have {layout.num_experts} experts, its config.json says {model.moe_num_experts}")
    whole_numbers = set(empty.state_dict()) - {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    if whole_numbers:
        raise UserError(f"{family}: has {min(whole_numbers)}, which is not of floating-point numbers; use another family")
    if not hasattr(empty.config, "num_experts_per_tok"):
        raise UserError(f"{family}: its configuration has no num_experts_per_tok; use another family")
    choices = {getattr(module, "num_router_classes", layout.num_experts) for module in empty.modules()}
    if choices != {layout.num_experts}:
        raise UserError(f"{family}: its routers also choose to skip all experts, which training does not support; "
                        "use another family")
    if "router_logits" not in (getattr(empty.base_model, "_can_record_outputs", None) or {}):
        raise UserError(f"{family}: does not report its routers' scores, which load balancing needs; use another family")
    head = empty.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(f"{family}: its output head has a bias, which training does not support; use another family")
    changed = [name for name in SCALED_LOGITS if getattr(empty.config, name, None) not in (None, 1, 1.0)]
    if changed:
        raise UserError(f"{family} with {changed[0]}: its logits are changed after the output head, which training does not "
                        "support; use another family")
    file_tensors(model)


def check_repeatable(model: ModelSection) -> None:
    """Raise UserError if the family draws random numbers in training: audits compare an update with that of training again."""
    settings = [(name, value) for module in empty_model(model).modules() for name, value in vars(module).items()]
    for name, value in settings:
        if any(part in name for part in RANDOM) and isinstance(value, float) and value > 0:
            raise UserError(f"model_type = {model.architecture!r} with {name} = {value}: training draws random numbers, so "
                            "audits of honest peers would fail; set it to 0 in config.json, or sync.audited_share to 0")

"""Building the layout, the initial state and the model of a campaign's model section, from a model on the meta device.

Names are those of transformers' modules, except that the fused `...experts.gate_up_proj [E, 2F, H]` is one tensor per expert,
`...experts.{e}.gate_up_proj [2F, H]`. Tied weights occur once, under their first name. The experts' low-rank terms
(`low_rank.py`), `...experts.low_rank.gate_up_proj [E, 2F, rank]`, do not exist in transformers.

What a checkpoint holds besides parameters, such as the biases with which routers were balanced in pretraining, is part of the
flat state, too. It is a parameter here that needs no gradient: its updates are 0, so it keeps the value of base 0.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.backends import BackendName, choose_backend
from spes_p2p.model.formats import Home, StoredFormat, StoredPlace
from spes_p2p.model.layout import Kind, Layout, TensorSpec, check_size
from spes_p2p.model.low_rank import directions, low_rank_name
from spes_p2p.model.partitioned import MATRICES, PartitionedExperts, expert_blocks
from spes_p2p.model.prefetch import LayerPrefetcher
from spes_p2p.model.stored import allocate

State = npt.NDArray[np.float32]

ROUTERS = ("gate", "router")
"""Names that transformers gives the module beside the experts that chooses among them."""


def transformers_config(model: ModelSection) -> PreTrainedConfig:
    """Return transformers' configuration of a model section. Raises UserError for an unknown family or a value it refuses."""
    family = model.architecture
    try:
        known = family in CONFIG_MAPPING and CONFIG_MAPPING[family] in MODEL_FOR_CAUSAL_LM_MAPPING
    except (ImportError, ValueError):
        known = False
    if not known:
        raise UserError(f"model_type = {family!r}: no family of language models in transformers {transformers.__version__}; "
                        "use a checkpoint of another family, or a newer transformers")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what is wrong is refused here or later, in one line
    try:
        return CONFIG_MAPPING[family].from_dict(model.config_json)
    except Exception as error:  # families and the validation library raise their own types
        raise refused(model.architecture, error) from None
    finally:
        transformers.logging.set_verbosity(verbosity)


def empty_model(model: ModelSection) -> PreTrainedModel:
    """Return the transformers model on the meta device: shapes without memory. Raises UserError as `transformers_config`.

    Persistent buffers of floating-point numbers are parameters that need no gradient.
    """
    config = transformers_config(model)
    config.pad_token_id = None  # a padding id would freeze its row of the embedding
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # `check_family` refuses them
            empty: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    except Exception as error:  # families raise their own types
        raise refused(model.architecture, error) from None
    for module in empty.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return empty


def refused(family: str, error: Exception) -> UserError:
    """Return the error for a `config.json` that transformers does not take."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"model_type = {family!r}: transformers refuses its config.json: {reason}")


@lru_cache(maxsize=8)
def layout_of(config: ModelSection) -> Layout:
    """Return the layout of the model's flat state."""
    model = empty_model(config)
    plain = layout_of_model(model)
    check_size(plain)
    top_k = getattr(model.config, "num_experts_per_tok", 1)
    if not 1 <= top_k <= plain.num_experts:
        raise UserError(f"model: num_experts_per_tok = {top_k}: must be 1 to its number of experts, {plain.num_experts}")
    if not config.moe_low_rank:
        return plain
    specs = [placed.spec for placed in plain.tensors]
    for block, _ in expert_blocks(model):
        for matrix in MATRICES:
            one = plain.by_name[f"{block}.0.{matrix}"].spec
            if config.moe_low_rank > min(one.shape):
                raise UserError(f"model.moe_low_rank = {config.moe_low_rank}: must be at most {min(one.shape)}, an expert's")
            shape = (plain.num_experts, one.shape[0], config.moe_low_rank)
            specs.append(TensorSpec(low_rank_name(block, matrix), shape, "shared", one.layer))
    return Layout(specs)


def layout_of_model(model: nn.Module) -> Layout:
    """Return the layout of a transformers model with plain experts and a router beside them. Raises UserError for others."""
    blocks = [name for name, _ in expert_blocks(model)]
    routers = tuple(_router_of(model, name) for name in blocks)
    layers = {name.rpartition(".")[0] for name in blocks}
    specs: list[TensorSpec] = []
    for name, parameter in model.named_parameters():
        block, _, matrix = name.rpartition(".")
        layer, shape = layer_number(name), tuple(parameter.shape)
        if block in blocks:
            specs += [TensorSpec(f"{block}.{e}.{matrix}", shape[1:], "expert", layer, e) for e in range(shape[0])]
        else:
            # A parameter of the layer itself, such as one bias per expert, belongs to the router.
            routes = name.startswith(routers) or block in layers
            kind: Kind = "router" if routes else "shared"
            specs.append(TensorSpec(name, shape, kind, layer, is_fixed=not parameter.requires_grad))
    return Layout(specs)


def _router_of(model: nn.Module, block: str) -> str:
    """Return the name prefix of the router's parameters for this block of experts."""
    beside, _, _ = block.rpartition(".")
    layer = model.get_submodule(beside)
    for name in ROUTERS:
        if any(True for _ in getattr(layer, name, nn.Identity()).parameters()):
            return f"{beside}.{name}."
    raise UserError(f"{type(layer).__name__}: no router beside its experts ({' or '.join(ROUTERS)} with parameters); "
                    "use a supported class such as olmoe or qwen3_moe")


def initial_state(config: ModelSection, out: State | None = None) -> State:
    """Return base 0, flat float32 `[layout.size]`, in `out` if given: transformers' initialisation with the config's seed.

    Only one module is in memory besides the result. Bits differ between machines even for equal seeds, so base 0 is created
    once and downloaded. Raises UserError for a family some of whose weights get no value, or an infinite one.
    """
    model, layout = empty_model(config), layout_of(config)
    state = np.empty(layout.size, np.float32) if out is None else out
    state[:] = np.nan
    for placed in layout.tensors:
        if placed.spec.is_low_rank:
            state[placed.start : placed.stop] = 0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(config.seed)
        for prefix, module in model.named_modules():
            if not module._parameters:
                continue
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                parameter.fill_(torch.nan)
            try:
                model._init_weights(module)
                if any(parameter.isnan().any() for parameter in module.parameters(recurse=False)):  # its parent gives it values
                    model._init_weights(model.get_submodule(prefix.rpartition(".")[0]))
            except (RuntimeError, ValueError) as error:
                raise refused(config.architecture, error) from None
            if any(parameter.isinf().any() for parameter in module.parameters(recurse=False)):
                raise UserError(f"model_type = {config.architecture!r}: transformers gives {prefix} infinite initial values; "
                                "lower initializer_range")
            if config.init_cutoff_factor is not None:
                _cut_off(module, config.init_cutoff_factor, model.config.initializer_range)
            for name, parameter in module.named_parameters(prefix, recurse=False):
                _put(state, layout, name, parameter.numpy())
            module.to_empty(device="meta", recurse=False)
    if np.isnan(state.min()):
        missing = next(placed.spec.name for placed in layout.tensors if np.isnan(state[placed.start : placed.stop]).any())
        raise UserError(f"model_type = {config.architecture!r}: transformers gives {missing} no initial value; use random "
                        "weights of another family, or begin with a checkpoint of this one (--from)")
    return state


def _cut_off(module: nn.Module, factor: float, deviation: float) -> None:
    """Draw the module's matrices anew where they are beyond `factor` deviations; embeddings of padding stay zero."""
    for parameter in module.parameters(recurse=False):
        while parameter.requires_grad and parameter.ndim > 1 and (beyond := parameter.abs() > factor * deviation).any():
            parameter[beyond] = deviation * torch.randn(int(beyond.sum()))


def build_model(
    config: ModelSection,
    base: State,
    owned: Sequence[int],
    stored: StoredFormat = "fp32",
    device: str | torch.device = "cpu",
    stored_on: StoredPlace = "device",
    backend: BackendName = "auto",
    home_of: Callable[[int | None], Home] = lambda layer: "device",
    host_home: Home = "host",
) -> PreTrainedModel:
    """Return the model that a peer trains: owned experts trainable, foreign ones stored. Allocates each tensor once.

    `home_of`: where a layer's weights are between uses, or those outside layers (None). `host_home`: where foreign experts in
    main memory are.

    Raises UserError, naming the alternatives, for a stored format or backend that this device does not support.
    """
    model, layout, device = empty_model(config), layout_of(config), torch.device(device)
    chosen = choose_backend(backend, device, *layout.expert_shape)
    # On a CPU, host memory is device memory.
    prefetcher = LayerPrefetcher(device) if stored_on == "host" and device.type != "cpu" else None
    for name, block in list(expert_blocks(model)):
        exact = partial(exact_expert, base, layout, name)
        home = home_of(layer_number(name))
        stored_home: Home = host_home if stored_on == "host" else home
        experts = PartitionedExperts(block, owned, stored, device, exact, chosen, prefetcher, home, stored_home)
        if config.moe_low_rank:
            experts.add_low_rank(name, config.moe_low_rank)
        model.set_submodule(name, experts)

    def weights(name: str, shape: tuple[int, ...]) -> Tensor:
        home = home_of(layer_number(name))
        values = allocate(shape, device, home)
        return values if home == "absent" else values.copy_(exact_tensor(base, layout, name))

    materialise(model, weights, device)
    return model


def layer_number(name: str) -> int | None:
    """Return the number of the layer that a module or parameter of this name belongs to."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    return int(number[1]) if number else None


def exact_tensor(base: State, layout: Layout, name: str) -> Tensor:
    """Return a float32 copy of one tensor of the base."""
    placed = layout.by_name[name]
    return torch.from_numpy(np.array(base[placed.start : placed.stop], np.float32)).view(placed.spec.shape)


def plain_tensor(base: State, layout: Layout, name: str) -> Tensor:
    """Return a float32 copy of one tensor as transformers has it: low-rank terms are added to an expert's matrix."""
    values, spec = exact_tensor(base, layout, name), layout.by_name[name].spec
    expert, _, matrix = name.rpartition(".")
    term = layout.by_name.get(low_rank_name(expert.rpartition(".")[0], matrix))
    if spec.expert is not None and term is not None:
        one = term.start + spec.expert * (term.stop - term.start) // term.spec.shape[0]
        factor = torch.from_numpy(np.array(base[one : one + spec.shape[0] * term.spec.shape[2]], np.float32))
        values += factor.view(spec.shape[0], -1) @ directions(term.spec.name, term.spec.shape[2], spec.shape[1])
    return values


def exact_expert(base: State, layout: Layout, block: str, expert: int, matrix: str) -> Tensor:
    """Return a float32 copy of one matrix of an expert; `block` is the name of the layer's experts module."""
    return exact_tensor(base, layout, f"{block}.{expert}.{matrix}")


def _put(state: State, layout: Layout, name: str, values: npt.NDArray[np.float32]) -> None:
    """Write a parameter to the state, unless it is tied to one that the layout has under another name."""
    block, _, matrix = name.rpartition(".")
    if matrix in MATRICES and f"{block}.0.{matrix}" in layout.by_name:
        for expert, rows in enumerate(values):
            _put(state, layout, f"{block}.{expert}.{matrix}", rows)
    elif name in layout.by_name:
        placed = layout.by_name[name]
        state[placed.start : placed.stop] = values.reshape(-1)


def materialise(model: PreTrainedModel, values: Callable[[str, tuple[int, ...]], Tensor], device: torch.device) -> None:
    """Fill everything that is still on the meta device, parameters with these values, buffers on this device; tied ones stay
    tied."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            filled[parameter] = nn.Parameter(values(name, tuple(parameter.shape)), parameter.requires_grad)
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, key, filled[parameter])
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                model._init_weights(module)

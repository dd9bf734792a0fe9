"""Other forms of the layers outside the experts are used only where they agree and help; otherwise nothing changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_shapes import tiny_model
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from spes_p2p.model.build import build_model, initial_state
from spes_p2p.training import compiled
from spes_p2p.training.compiled import TOLERANCE, Form, Trial, attention, forms_of, keep_what_helps, trial_of
from spes_p2p.training.documents import Documents

EOS = 0
IDS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))
IDS[:, 6] = EOS


def model_of(architecture: str = "olmoe") -> PreTrainedModel:
    config = tiny_model(architecture=architecture, hidden_size=64)
    return build_model(config, initial_state(config), (0, 2)).train()


def trial(model: PreTrainedModel, documents: Documents | None = None) -> Trial:
    return trial_of(model, IDS, documents, lambda: torch.autocast("cpu", enabled=False))


def timed(model: PreTrainedModel, seconds: Callable[[], float]) -> Callable[[], Trial]:
    """Trials of the model that say they took this long."""
    return lambda: Trial(trial(model).tensors, seconds())


def scaled(model: PreTrainedModel, factor: float) -> Form:
    """A form that computes something else."""
    norm = model.base_model.layers[0].input_layernorm.weight.data
    return Form("other", lambda: norm.mul_(factor), lambda: norm.div_(factor))


@pytest.mark.parametrize(("factor", "seconds", "is_used", "line"), [
    (1.0, [2.0, 1.0], True, "other: used (relative difference 0.0e+00, 2.00 times as fast)"),
    (1.0, [1.0, 2.0], False, "other: not used (relative difference 0.0e+00, 0.50 times as fast)"),
    (4.0, [2.0, 1.0], False, "other: not used (relative difference "),
    (float("nan"), [2.0, 1.0], False, "other: not used (relative difference nan"),
])
def test_a_form_is_used_if_it_agrees_and_is_faster(
    factor: float, seconds: list[float], is_used: bool, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, times, undone = model_of(), iter(seconds), []
    form = scaled(model, factor)
    with caplog.at_level(logging.INFO):
        keep_what_helps([Form(form.name, form.use, lambda: undone.append(True))], timed(model, lambda: next(times)), TOLERANCE)
    assert caplog.messages[0].startswith(line)
    assert undone == ([] if is_used else [True])


def test_a_form_that_fails_is_undone_and_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler here\nand a long trace")

    model = model_of()
    before = trial(model)
    with caplog.at_level(logging.INFO):
        keep_what_helps([Form("compiled layers", fail, lambda: None)], timed(model, lambda: 1.0), TOLERANCE)
    assert caplog.messages == ["compiled layers: not used (no compiler here)"]
    assert trial(model).difference(before) == 0


@pytest.mark.long
def test_what_does_not_compile_in_another_shape_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", False)
    model, seconds = model_of(), iter([2.0, 1.0])
    norm, shapes = model.base_model.layers[0].input_layernorm, []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        shapes.append(next(each.shape for each in inputs if each.ndim == 3))
        if len(set(shapes)) > 1:
            raise RuntimeError("cannot compile this shape")
        return graph.forward

    form = Form("compiled norm", lambda: norm.compile(dynamic=False, backend=backend), lambda: None)
    keep_what_helps([form], timed(model, lambda: next(seconds)), TOLERANCE)
    with torch.no_grad():
        found = norm(torch.ones(1, 3, 64))
    assert shapes[0] == (2, 16, 64)
    assert shapes[-1] == (1, 3, 64)
    torch.testing.assert_close(found, norm.forward(torch.ones(1, 3, 64)))
    torch._dynamo.reset()


@pytest.mark.parametrize(("is_installed", "is_masked", "names"), [
    (False, False, ["compiled layers"]), (True, False, ["FlashAttention", "compiled layers"]),
    (True, True, ["FlashAttention", "FlexAttention", "compiled layers"]),
])
def test_flash_attention_is_tried_where_its_package_is_installed(
    is_installed: bool, is_masked: bool, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_flash_attn_2_available", lambda: is_installed)
    assert [form.name for form in forms_of(model_of(), is_masked)] == names


def crossing(*arguments: Any, **named: Any) -> Any:
    """Attention within a sample, whatever its documents, as FlashAttention's in passes of several samples."""
    module, query, key, value, _, *rest = arguments
    return sdpa_attention_forward(module, query, key, value, None, *rest, **named)


def test_attention_that_crosses_documents_is_undone_and_leaves_what_was_kept_before(caplog: pytest.LogCaptureFixture) -> None:
    AttentionInterface.register("crossing", crossing)
    model, seconds = model_of("qwen3_moe"), iter([4.0, 3.0, 2.0, 1.0])
    forms = [attention(model, name, name) for name in ("eager", "crossing", "absent")]
    with caplog.at_level(logging.INFO):
        keep_what_helps(forms, lambda: Trial(trial(model, Documents(EOS, 0)).tensors, next(seconds)), TOLERANCE)
    assert [line.partition(" (")[0] for line in caplog.messages] == ["eager: used", "crossing: not used", "absent: not used"]
    assert model.config._attn_implementation == "eager"


def test_a_trial_sees_a_wrong_gradient() -> None:
    model = model_of()
    right = trial(model)
    model.base_model.layers[1].self_attn.o_proj.weight.register_hook(lambda gradient: 2 * gradient)
    assert trial(model).difference(right) > 0.1


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = model_of()
    state = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        before = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    trial(model)
    assert all(parameter.grad is None and torch.equal(parameter, state[name]) for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model.base_model(input_ids=IDS, use_cache=False).last_hidden_state, before)


@pytest.mark.slow
def test_compiled_layers_agree_with_plain_ones_and_are_taken_back() -> None:
    """On a CPU with a C++ compiler."""
    model = model_of()
    (form,) = forms_of(model, is_masked=False)
    plain = trial(model)
    form.use()
    assert trial(model).difference(plain) < TOLERANCE
    assert any(module._compiled_call_impl is not None for module in model.modules())
    form.undo()
    assert not any(module._compiled_call_impl is not None for module in model.modules())
    assert trial(model).difference(plain) == 0


@pytest.mark.slow
def test_flex_attention_agrees_on_documents_that_are_kept_apart() -> None:
    model, documents = model_of("qwen3_moe"), Documents(EOS, 0)
    flex, _ = forms_of(model, is_masked=True)
    plain = trial(model, documents)
    flex.use()
    with torch.no_grad():
        model.eval()
        positions = documents.positions(IDS)
        found = model.base_model(input_ids=IDS, position_ids=positions, use_cache=False).last_hidden_state
        flex.undo()
        expected = model.base_model(input_ids=IDS, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert trial(model.train(), documents).difference(plain) == 0

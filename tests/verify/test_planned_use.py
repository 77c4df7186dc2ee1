from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.errors import PlanError
from bigmodel.plan import Plan, plan
from bigmodel.profile.machine.machine import nominal_machine
from bigmodel.profile.trace.generation import keeps_mask
from bigmodel.verify.planned_use import planned_use

from ..examples import alike

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
}  # fmt: skip


def planned(model: Any, new_tokens: int = 2, padded: bool = True) -> Plan:
    shape: dict[str, Any] = {"batch_size": 2, "context_length": 12, "new_tokens": new_tokens, "padded": padded}
    return plan(model, {"cpu": "1GB"}, **shape, machine=nominal_machine())


def llama() -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, decoder_start_token_id=0)).eval()


def bert() -> Any:
    return t.BertForMaskedLM(t.BertConfig(**SIZES)).eval()


def mamba() -> Any:
    """Its cache is of recurrent states."""
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "num_hidden_layers": 2}
    return t.Mamba2ForCausalLM(t.Mamba2Config(**sizes, vocab_size=64)).eval()


def resnet() -> Any:
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return t.ResNetForImageClassification(config).eval()


@pytest.mark.slow
@alike(
    ("make", "passes"),
    [
        (llama, ["prompt", "step"]),
        (bert, ["forward"]),
        (resnet, ["forward"]),
        (mamba, ["prompt", "step"]),
        (t5, ["prompt", "step"]),
    ],
    first=3,
)
def test_the_passes_of_a_model_are_those_of_its_plan(make: Any, passes: list[str]) -> None:
    model = make()
    found = planned(model)
    use = planned_use(model, found)
    assert list(use.passes) == passes
    assert found.prediction is not None
    assert (found.prediction.prefill is None) == (len(passes) == 1)
    with torch.inference_mode():
        use.whole()
        for run in use.passes.values():
            run()


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_generation_continues_to_the_last_planned_token_with_padding_too_if_that_is_planned(padded: bool) -> None:
    model = llama()
    use = planned_use(model, planned(model, new_tokens=3, padded=padded))
    seen: list[tuple[int, bool]] = []
    hook = model.model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append((given["input_ids"].shape[1], given["attention_mask"] is not None)),
        with_kwargs=True,
    )
    use.whole()
    hook.remove()
    whole = [(9, keeps_mask()), *[(1, keeps_mask())] * 3]
    assert seen == whole + ([(9, True), *[(1, True)] * 3] if padded else [])


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_runs_with_padding_too_if_that_is_planned(padded: bool) -> None:
    model = bert()
    use = planned_use(model, planned(model, padded=padded))
    masked: list[bool] = []

    def note(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        mask = given.get("attention_mask")
        masked.append(mask is not None and not bool(mask.all()))

    with torch.inference_mode():
        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        use.whole()
        hook.remove()
    assert any(masked) == padded
    assert not all(masked)


@pytest.mark.slow
def test_an_encoder_decoder_of_one_new_token_has_no_step_of_its_own() -> None:
    model = t5()
    assert list(planned_use(model, planned(model, new_tokens=1)).passes) == ["prompt"]


def test_a_model_of_unknown_inputs_is_refused() -> None:
    model = bert()
    found = planned(model)
    model.main_input_name = "voltages"
    with pytest.raises(PlanError, match="voltages"):
        planned_use(model, found)


@pytest.mark.slow
def test_texts_are_generated_as_the_generation_config_has_it() -> None:
    model = llama()
    model.generation_config.update(num_beams=3, do_sample=False)
    use = planned_use(model, planned(model))
    rows: set[int] = set()
    hook = model.model.register_forward_pre_hook(
        lambda _module, _args, given: rows.add(given["input_ids"].shape[0]), with_kwargs=True
    )
    use.whole()
    hook.remove()
    assert rows == {6}  # two texts

"""Memory of a generation: predictions against peaks measured on the virtual accelerator, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.plan import Plan, make_plan
from bigmodel.profile import attention_by_group, profile_model
from bigmodel.profile.trace import generation
from bigmodel.profile.trace.events import Allocate, Free, Return
from bigmodel.profile.trace.generation import encode_media, keeps_mask
from bigmodel.profile.trace.inputs import padding_mask
from bigmodel.profile.trace.recorder import Recorder
from bigmodel.profile.trace.session import Session
from bigmodel.profile.trace.workload import Workload

from ...examples import alike, some

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"
CPU = torch.device("cpu")


def small(family: str, layers: int = 2, window: int = 24) -> Any:
    """A model with real weights, small."""
    if family == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=160, n_positions=128)
        ).eval()
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 128,
    }  # fmt: skip
    if family == "electra":  # an encoder, with a head for the next token
        return t.ElectraForCausalLM(t.ElectraConfig(**sizes, embedding_size=64, eos_token_id=2)).eval()
    if family == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_local_experts=4)).eval()
    if family == "opt":  # many words beside few layers: the scores of the next token are its largest tensors
        opt = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 459}
        return t.OPTForCausalLM(t.OPTConfig(**opt, word_embed_proj_dim=32)).eval()
    windowed: dict[str, Any] = {"sliding_window": window, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kinds = ["sliding_attention", "full_attention"]
    if family == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**sizes, **windowed)).eval()
    if family == "qwen2":
        config = t.Qwen2Config(**sizes, **windowed, use_sliding_window=True, max_window_layers=1)
        return t.Qwen2ForCausalLM(config).eval()
    if family == "gemma2":
        return t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, **windowed, head_dim=16)).eval()
    if family == "gemma3":
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes, **windowed, head_dim=16, layer_types=kinds)).eval()
    if family == "cohere2":
        return t.Cohere2ForCausalLM(t.Cohere2Config(**sizes, **windowed, layer_types=kinds)).eval()
    if family == "cpmant":  # its forwards read the whole text, and leave out what the cache holds
        own = {"hidden_size": 64, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 96, "num_hidden_layers": layers}
        return t.CpmAntForCausalLM(t.CpmAntConfig(**own, vocab_size=160, prompt_types=4, prompt_length=8)).eval()
    if family == "gpt_oss":
        sizes |= {"head_dim": 16}
        return t.GptOssForCausalLM(t.GptOssConfig(**sizes, **windowed, num_local_experts=4)).eval()
    if family == "phi3":
        return t.Phi3ForCausalLM(t.Phi3Config(**sizes, **windowed)).eval()
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes)).eval()


FURTHER_WINDOWED = ["qwen2", "gemma3", "cohere2", "gpt_oss", "phi3"]


def peak_of_generating(model: Any, batch_size: int, prompt: int, new_tokens: int) -> int:
    """Return the peak bytes of the device while `generate` feeds `new_tokens` tokens, with ids and mask.

    Texts are run with and without padding: it depends on the kernels which takes more.
    """
    gc.collect()
    reset_peak_memory(DEVICE)
    ids = torch.arange(batch_size * prompt, device="cpu").reshape(batch_size, prompt).to(DEVICE) % 160
    # The token that generate returns last is not fed to the model.
    # The token that ends a text is one that never comes.
    asked = {"max_new_tokens": new_tokens + 1, "eos_token_id": 10**6, "pad_token_id": 0}
    whole, padded = torch.ones(batch_size, prompt, dtype=torch.long), padding_mask(batch_size, prompt)
    with torch.inference_mode():
        for mask in (whole, padded):
            model.generate(ids, attention_mask=mask.to(DEVICE), do_sample=False, **asked)
    return max_memory_allocated(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "batch_size", "prompt", "new_tokens"),
    [
        ("llama", 1, 60, 1),
        pytest.param("gpt2", 3, 40, 2, marks=pytest.mark.long),
        pytest.param("electra", 2, 30, 2, marks=pytest.mark.long),
        pytest.param("mixtral", 2, 3, 8, marks=pytest.mark.long),
        *some([("llama", 2, 3, 8), ("opt", 3, 3, 3)], first=0),
    ],
)
def test_the_peak_of_generate_is_predicted_to_the_byte(
    family: str, batch_size: int, prompt: int, new_tokens: int
) -> None:
    model = small(family)
    profile = profile_model(
        model, batch_size=batch_size, context_length=prompt + new_tokens, new_tokens=new_tokens, device_type="virtual"
    )
    dynamic = profile.dynamic_peaks({}, main=0)[0]
    predicted = profile.weights + profile.buffers + dynamic
    assert peak_of_generating(model.to(DEVICE), batch_size, prompt, new_tokens) == predicted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prompt", "new_tokens"),
    [
        *some([("mistral", 60, 2), ("gemma2", 60, 2)], first=1),
        pytest.param("gemma2", 22, 4, marks=pytest.mark.long),
        *((name, 22, 4) for name in some(FURTHER_WINDOWED, first=0)),
    ],
)
def test_the_peak_of_sliding_windows_is_predicted_to_the_byte(family: str, prompt: int, new_tokens: int) -> None:
    """Prompts longer than the window, and windows that fill in generation."""
    model = small(family)
    shapes = {"context_length": prompt + new_tokens, "new_tokens": new_tokens, "device_type": "virtual"}
    profile = profile_model(model, batch_size=2, **shapes)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert peak_of_generating(model.to(DEVICE), 2, prompt, new_tokens) == predicted


@pytest.mark.slow
def test_the_first_step_runs_beside_the_storage_of_a_prompt_longer_than_the_window() -> None:
    """Steps of gpt-oss copy experts and take more than the prompt; the last block has a window, too."""
    model = small("gpt_oss", layers=3, window=4)
    profile = profile_model(model, batch_size=1, context_length=15, new_tokens=3, device_type="virtual")
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert peak_of_generating(model.to(DEVICE), 1, 12, 3) == predicted


def planned(model: Any, share: float, **shapes: Any) -> Plan:
    """A plan under which only part of the weights can stay on the accelerator."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    profile = profile_model(model, device_type="virtual", **shapes)
    return make_plan(profile, {0: int(share * weights) + profile.activations + sum(profile.kv_cache), "cpu": "1GB"})


@pytest.mark.slow
@alike("family", ["llama", "gemma2"], first=1)
@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_the_peak_of_a_streamed_model_is_predicted_to_the_byte(family: str) -> None:
    from bigmodel.dispatch import dispatch_model

    model = small(family, layers=4)
    plan = planned(model, 0.7, batch_size=2, context_length=64, new_tokens=1)
    assert len(plan.streamed) > 1
    dispatch_model(model, plan.device_map, main_device=plan.main_device)
    assert peak_of_generating(model, 2, 63, 1) == plan.devices[0].total


@pytest.mark.slow
def test_a_prompt_may_fill_the_context_if_new_tokens_are_not_given() -> None:
    """A plain forward of the whole context holds the plan: it has no mask and no positions of its own."""
    from bigmodel.dispatch import dispatch_model

    model = small("llama", layers=4)
    plan = planned(model, 0.8, batch_size=1, context_length=128, padded=False)
    dispatch_model(model, plan.device_map, main_device=plan.main_device)
    gc.collect()
    reset_peak_memory(DEVICE)
    with torch.inference_mode():
        model(torch.zeros(1, 128, dtype=torch.long, device=DEVICE))
    measured = max_memory_allocated(DEVICE)
    not_there = 2 * 128 * 8 + 5 * 8
    assert plan.devices[0].total - not_there <= measured <= plan.devices[0].total


@pytest.mark.slow
def test_the_last_step_of_a_full_context_is_planned_for_too() -> None:
    profile = profile_model(small("llama"), context_length=64)
    one = profile_model(small("llama"), context_length=64, new_tokens=1)
    assert [phase.tokens for phase in profile.phases] == [64, 1]
    assert [phase.tokens for phase in one.phases] == [63, 1]
    assert profile.kv_cache == one.kv_cache


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_inputs_that_go_to_an_embedding_on_the_host_and_back_are_counted() -> None:
    """`generate` brings them to the model's first weights, and the dispatched model back to where it runs."""
    from bigmodel.dispatch import dispatch_model

    model = small("llama")
    profile = profile_model(model, batch_size=2, context_length=64, new_tokens=1, device_type="virtual")
    device_map = {unit.name: "cpu" if unit.name == "model.embed_tokens" else 0 for unit in profile.units}
    runs = {index: device_map[unit.name] for index, unit in enumerate(profile.units)}
    predicted = profile.dynamic_peaks(runs, 0, input_device="cpu")[0]
    table = model.model.embed_tokens.weight.nbytes
    dispatch_model(model, device_map, main_device=0)
    assert peak_of_generating(model, 2, 63, 1) == profile.weights + profile.buffers - table + predicted


@pytest.mark.slow
@alike(("family", "apart"), [("gpt2", 2), ("llama", 1), ("gpt2", 1), ("llama", 3)], first=1)
def test_peaks_of_two_accelerators_are_predicted_to_the_byte(family: str, apart: int) -> None:
    """GPT-2 adds positions to words, each of which may lie elsewhere; scores come back to where the inputs are."""
    from bigmodel.dispatch import dispatch_model

    model = small(family)
    profile = profile_model(model, batch_size=2, context_length=64, new_tokens=2, device_type="virtual")
    runs = {index: int(index >= apart) for index in range(len(profile.units))}
    predicted = profile.dynamic_peaks(runs, 0, input_device=runs[profile.first])
    before = [memory_allocated(f"virtual:{index}") for index in range(2)]
    dispatch_model(model, {unit.name: runs[index] for index, unit in enumerate(profile.units)}, main_device=0)
    there = [memory_allocated(f"virtual:{index}") - before[index] for index in range(2)]
    reset_peak_memory("virtual:1")
    peak_of_generating(model, 2, 62, 2)
    peaks = [max_memory_allocated(f"virtual:{index}") - before[index] for index in range(2)]
    assert peaks == [there[index] + predicted.get(index, 0) for index in range(2)]


@pytest.mark.slow
@alike(("family", "new_tokens"), [("gpt2", None), ("mixtral", 5)], first=1)
def test_a_resized_cache_is_that_of_forwards(
    family: str, new_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin runs the forwards that resizing saves."""
    model = small(family)

    def facts() -> list[object]:
        found = profile_model(model, context_length=32, batch_size=2, new_tokens=new_tokens, device_type="virtual")
        maps: list[dict[int, Any]] = [{}, {unit: unit % 2 or "cpu" for unit in range(len(found.units))}]
        alive = [sorted((held.unit, held.nbytes) for held in phase.trace.initial) for phase in found.phases]
        return [found.kv_cache, alive, *(found.dynamic_peaks(execution_devices, 0) for execution_devices in maps)]

    resized = facts()
    monkeypatch.setattr(generation._Loop, "can_resize", lambda _: False)
    assert resized == facts()


@pytest.mark.slow
def test_the_next_token_is_appended_before_the_output_is_freed() -> None:
    """Ids, position ids and, where it is kept, the mask of one more token are alive beside all logits."""
    profile = profile_model(small("gpt2"), context_length=20, new_tokens=4, all_logits=True)
    events = profile.phases[0].trace.events
    (at,) = [place for place, event in enumerate(events) if isinstance(event, Return)]
    returned = events[at]
    assert isinstance(returned, Return)
    freed = events.index(Free(returned.outputs[0][0]))
    longer = [event for event in events[at:freed] if isinstance(event, Allocate) and event.nbytes == 17 * 8]
    assert len(longer) == 2 + keeps_mask()


@pytest.mark.slow
def test_suppressed_tokens_and_the_decoders_first_are_kept_beside_special_tokens() -> None:
    """Those of generation's config: a decoder does not look in its own for its first token."""
    model = small("gpt2")
    model.generation_config.update(decoder_start_token_id=1, suppress_tokens=[4, 5, 6], begin_suppress_tokens=[7])
    profile = profile_model(model, batch_size=2, context_length=30, new_tokens=2, device_type="virtual")
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert peak_of_generating(model.to(DEVICE), 2, 28, 2) == predicted


class Seeing(nn.Module):
    """Takes images, or what its encoder makes of them."""

    input_modalities = ("image", "text")

    def get_image_features(self, pixel_values: torch.Tensor, return_dict: bool = False) -> dict[str, torch.Tensor]:
        return {"pooled": pixel_values * 2}

    def forward(self, input_ids: torch.Tensor, pixel_values: Any = None, mm_encoder_outputs: Any = None) -> None: ...


def test_images_are_encoded_before_the_first_forward_if_it_takes_the_outputs() -> None:
    session, pixels, other = Session(Seeing(), Recorder(iter([])), Workload(), CPU), torch.ones(2), torch.zeros(1)
    left, encoded = encode_media(session, {"pixel_values": pixels, "token_type_ids": other})
    assert left == {"token_type_ids": other}
    assert torch.equal(encoded["image"]["pooled"], pixels * 2)


@pytest.mark.slow
def test_a_model_that_generates_without_a_cache_reads_the_whole_text_in_each_step() -> None:
    model = small("gpt2")
    model.generation_config.use_cache = False
    profile = profile_model(model, batch_size=2, context_length=60, new_tokens=6, device_type="virtual")
    assert sum(profile.kv_cache) == 0
    predicted = profile.dynamic_peaks({}, main=0)[0]
    measured = peak_of_generating(model.to(DEVICE), 2, 54, 6) - profile.weights - profile.buffers
    assert 0.95 * predicted <= measured <= predicted


@pytest.mark.slow
def test_a_model_that_reads_the_whole_text_beside_its_cache_is_planned_with_both() -> None:
    model = small("cpmant")
    profile = profile_model(model, batch_size=2, context_length=24, new_tokens=4, device_type="virtual")
    assert [phase.name for phase in profile.phases] == ["prefill", "decode"]
    assert sum(profile.kv_cache) > 0
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert peak_of_generating(model.to(DEVICE), 2, 20, 4) == predicted


def test_keeps_mask_holds_for_other_models() -> None:
    model: Any = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8))
    seen = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True)
    ids = torch.zeros(1, 3, dtype=torch.long)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert seen
    assert all((mask is not None) is keeps_mask() for mask in seen)


def test_keeps_mask_does_not_change_the_random_state() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    keeps_mask.cache_clear()
    torch.manual_seed(1)
    keeps_mask()
    assert torch.rand(1) == pytest.approx(expected)


@pytest.mark.slow
@alike(
    ("family", "chunk", "exact"),
    [("llama", 23, True), ("gpt2", 16, True), ("llama", 16, True), ("gemma2", 16, False)],
    first=1,
)
def test_a_prompt_in_chunks_takes_what_its_last_full_one_does(family: str, chunk: int, exact: bool) -> None:
    """The cache of a sliding window keeps what each forward leaves, a little less than is planned."""
    model, shapes = small(family), {"context_length": 70, "new_tokens": 4}
    whole = make_plan(model, {0: "100MB", "cpu": "100MB"}, **shapes).devices[0].total
    found = make_plan(model, {0: "100MB", "cpu": "100MB"}, **shapes, prefill_chunk_size=chunk)
    assert found.prefill_chunk_size == chunk
    planned = found.devices[0].total
    assert planned < whole
    before = memory_allocated(0)
    model = model.to(DEVICE)
    reset_peak_memory(0)
    ids = (torch.arange(66)[None] % 90).to(DEVICE)
    options = {"prefill_chunk_size": chunk, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for pads in (True, False):
        mask = padding_mask(1, 66, None if pads else 0).to(DEVICE)
        with torch.inference_mode(), attention_by_group(model):
            model.generate(ids, attention_mask=mask, eos_token_id=2**31, **options)
        del mask
    measured = max_memory_allocated(0) - before
    assert measured == planned if exact else 0.9 * planned <= measured <= planned


@pytest.mark.slow
def test_a_prompt_of_a_model_without_a_cache_is_whole() -> None:
    model = small("llama")
    model.generation_config.use_cache = False
    found = make_plan(model, {"cpu": "100MB"}, context_length=70, new_tokens=4, prefill_chunk_size=16)
    assert found.prefill_chunk_size is None


@pytest.mark.slow
def test_a_prompt_no_longer_than_a_chunk_is_whole() -> None:
    budgets = {"cpu": "100MB"}
    found = make_plan(small("llama"), budgets, context_length=70, new_tokens=6, prefill_chunk_size=64)
    assert found == make_plan(small("llama"), budgets, context_length=70, new_tokens=6)

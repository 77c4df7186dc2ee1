from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.devices import virtual
from bigmodel.profile import Workload, profile_units
from bigmodel.profile.trace.dry_run import dry_run
from bigmodel.profile.trace.events import OUTSIDE, Allocate, Enter, Leave, Route
from bigmodel.profile.trace.ledger import replay
from bigmodel.profile.trace.recorder import Recorder

from ...examples import alike
from ..models import Stack, on_meta, tiny_llama

CPU = torch.device("cpu")


def run(model: nn.Module, work: Workload, device: torch.device = CPU) -> dict[str, int]:
    phases = dry_run(model, profile_units(model), work, device)
    return {phase.name: replay(phase.trace, {}, 0).peak[0] for phase in phases}


@pytest.mark.slow
def test_a_model_that_generates_has_a_prefill_and_a_decode() -> None:
    phases = dry_run(tiny_llama(), profile_units(tiny_llama()), Workload(2, 65, 1), CPU)
    assert [(phase.name, phase.tokens) for phase in phases] == [("prefill", 64), ("decode", 1)]


@pytest.mark.slow
def test_the_cache_grows_to_the_whole_context_before_the_last_step() -> None:
    def cache(work: Workload) -> int:
        model = tiny_llama()
        trace = dry_run(model, profile_units(model), work, CPU)[-1].trace
        return sum(held.nbytes for held in trace.initial if held.unit >= 0)

    assert cache(Workload(2, 65, 40)) == cache(Workload(2, 65, 1)) == 4 * 2 * 2 * 64 * 32 * 4


@pytest.mark.slow
def test_logits_of_every_token_are_counted_with_all_logits() -> None:
    few = run(tiny_llama(vocab_size=4096, num_hidden_layers=1), Workload(1, 65, 1))
    all_ = run(tiny_llama(vocab_size=4096, num_hidden_layers=1), Workload(1, 65, 1, all_logits=True))
    assert all_["prefill"] >= 64 * 4096 * 4 > few["prefill"]


@pytest.mark.slow
def test_a_routing_names_the_bytes_of_an_expert_in_each_fused_tensor() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
    phases = dry_run(model, profile_units(model), Workload(2, 9, 1), CPU)
    routes = [event for phase in phases for event in phase.trace.events if isinstance(event, Route)]
    assert {route.expert_tensors for route in routes} == {(2 * 48 * 32 * 4, 48 * 32 * 4)}


class Choosy(Stack):
    """Refuses its inputs before its layers run, or after them; notes how many run in each forward of any copy."""

    layers_run: ClassVar[list[int]] = []

    def __init__(self, early: bool) -> None:
        super().__init__(depth=9)
        self.early = early

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.layers_run.append(0)
        if self.early:
            raise ValueError(f"{ids.shape} is not what this model takes")
        x = self.embed(ids)
        for block in self.blocks:
            self.layers_run[-1] += 1
            x = block(x)
        raise ValueError(f"{x.shape} is not what this head takes")


@pytest.mark.parametrize(("early", "runs"), [(True, [0]), (False, [4, 9])])
def test_only_inputs_that_may_pass_the_whole_model_are_given_to_it(early: bool, runs: list[int]) -> None:
    model, ids = Choosy(early), torch.zeros(2, 3, dtype=torch.long)
    Choosy.layers_run.clear()
    assert dry_run(model, profile_units(model), Workload(), CPU, example=((ids,), {})) == []
    assert Choosy.layers_run == runs


class TwoTowers(nn.Module):
    """Reads the output of a layer of its encoder by position, and that of the last layer of its decoder; notes how many
    layers run in each forward of any copy."""

    layers_run: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(depth=7), Stack(depth=9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.layers_run.append([0, 0])
        states = [self.encoder.embed(ids)]
        for block in self.encoder.blocks:
            self.layers_run[-1][0] += 1
            states.append(block(states[-1]))
        x = states[6]
        for block in self.decoder.blocks:
            self.layers_run[-1][1] += 1
            x = block(x)
        return x


def test_where_one_list_of_layers_must_run_whole_the_longest_is_sampled() -> None:
    model, ids = TwoTowers(), torch.zeros(2, 3, dtype=torch.long)
    units = profile_units(model)
    TwoTowers.layers_run.clear()
    few, every = (
        dry_run(model, units, Workload(), CPU, example=((ids,), {}), every_layer=every_layer)
        for every_layer in (False, True)
    )
    assert TwoTowers.layers_run == [[4, 0], [7, 4], [7, 9]]
    for placing in ({}, {index: index % 3 for index in range(len(units))}):
        assert replay(few[0].trace, placing, 0).peak == replay(every[0].trace, placing, 0).peak


class Sensing(nn.Module):
    """Reads an image or a sound, as models of several media do: the sound takes more."""

    main_input_name = "pixel_values"

    def __init__(self, hears: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=4, num_mel_bins=5, max_source_positions=200)
        self.seeing, self.hearing = nn.Linear(4, 4), nn.Linear(400 if hears else 7, 400)

    def forward(
        self, pixel_values: torch.Tensor | None = None, input_features: torch.Tensor | None = None
    ) -> torch.Tensor:
        found: torch.Tensor = self.hearing(input_features) if pixel_values is None else self.seeing(pixel_values)
        return found


def test_each_kind_of_media_that_a_model_takes_is_recorded() -> None:
    model = Sensing()
    (phase,) = dry_run(model, profile_units(model), Workload(), CPU)
    images, sounds = (replay(trace, {}, 0).peak[0] for trace in (phase.trace, *phase.also))
    assert (images, sounds) == (4 * 2 * 3 * 4 * 4, 4 * 2 * 5 * 400)
    assert phase.without == ""


def test_a_kind_of_media_that_cannot_be_recorded_is_named() -> None:
    model = Sensing(hears=False)
    (phase,) = dry_run(model, profile_units(model), Workload(), CPU)
    assert phase.without == "sounds"


@pytest.mark.slow
def test_a_deep_model_has_the_peaks_of_running_every_layer() -> None:
    model = tiny_llama(num_hidden_layers=9)
    units = profile_units(model)
    few, every = (
        dry_run(model, units, Workload(2, 65, 8), CPU, every_layer=every_layer) for every_layer in (False, True)
    )
    for placing in ({}, {index: index % 3 for index in range(len(units))}):
        for short, whole in zip(few, every, strict=True):
            assert replay(short.trace, placing, 0).peak == replay(whole.trace, placing, 0).peak


def test_a_model_that_is_not_from_transformers_runs_on_an_example() -> None:
    model = on_meta(Stack, width=16, depth=2, vocabulary=32)
    units = profile_units(model)
    assert dry_run(model, units, Workload(), CPU) == []
    ids = torch.zeros(4, 10, dtype=torch.long)
    (phase,) = dry_run(model, units, Workload(), CPU, example=((ids,), {}))
    ids_bytes, hidden, wide = 4 * 10 * 8, 4 * 10 * 16 * 4, 4 * 10 * 64 * 4
    # Inside a block: the ids, the input of the residual, and what goes into and comes out of the activation.
    assert replay(phase.trace, {}, 0).peak[0] == ids_bytes + hidden + 2 * wide


@pytest.mark.slow
def test_weights_that_will_be_cast_make_smaller_activations() -> None:
    model = tiny_llama()
    half = {id(parameter): torch.float16 for parameter in model.parameters()}
    units = profile_units(model)
    wide = replay(dry_run(model, units, Workload(1, 65, 1), CPU)[0].trace, {}, 0)
    narrow = replay(dry_run(model, units, Workload(1, 65, 1), CPU, half)[0].trace, {}, 0)
    assert narrow.now[0] < 0.6 * wide.now[0]


def test_a_forward_that_depends_on_values_is_unknown_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Choosy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: int(x.sum().item())]

    with caplog.at_level(logging.WARNING):
        assert dry_run(Choosy(), [], Workload(), CPU, example=((torch.ones(3),), {})) == []
    assert "Choosy" in caplog.text


@pytest.mark.slow
def test_on_a_virtual_accelerator_its_own_kernels_are_recorded(accelerators: None) -> None:
    assert run(tiny_llama(), Workload(2, 65, 1), torch.device("virtual:0"))["prefill"] > 0
    assert virtual.count() == 2
    assert torch.get_device_module("virtual").memory_allocated(0) == 0


@pytest.mark.slow
@alike("family", ["bert", "mixtral", "vit", "t5", "whisper"], first=3)
def test_families_of_models_are_run_by_their_configs(family: str) -> None:
    model, names = _family(family)
    assert list(run(model, Workload(2, 33, 8))) == names


def _family(family: str) -> tuple[nn.Module, list[str]]:
    import transformers as t

    if family == "t5":
        config = t.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=64)
        return on_meta(t.T5ForConditionalGeneration, config), ["prefill", "decode"]
    if family == "bert":
        config = t.BertConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
        )
        return on_meta(t.BertForMaskedLM, config), ["forward"]
    if family == "mixtral":
        config = t.MixtralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
            num_key_value_heads=2,
        )  # fmt: skip
        return on_meta(t.MixtralForCausalLM, config), ["prefill", "decode"]
    if family == "whisper":
        config = t.WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64,
            encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=50, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        return on_meta(t.WhisperForConditionalGeneration, config), ["prefill", "decode"]
    config = t.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32
    )
    return on_meta(t.ViTForImageClassification, config), ["forward"]


def test_integer_buffers_have_values() -> None:
    class Striding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("stride", torch.tensor(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stride.mul_(1)
            return x[:: int(self.stride)].clone()

    (phase,) = dry_run(Striding(), [], Workload(), CPU, example=((torch.ones(64),), {}))
    assert replay(phase.trace, {}, 0).peak[0] == (64 + 16) * 4


class CastsPart(nn.Module):
    """Casts a part of itself in its forward, as routers do that must be exact."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(x.dtype)
        return self.head(self.router(x))


def test_a_model_that_casts_a_part_of_itself_is_recorded() -> None:
    model = CastsPart()
    (phase,) = dry_run(model, profile_units(model), Workload(), CPU, example=((torch.zeros(2, 8),), {}))
    assert phase.trace.order() == [0, 1]
    assert model.router.weight.device == CPU


class SomeOfItsBlocks(nn.Module):
    """Runs some of its equal blocks, the last first."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.blocks[2](x))  # type: ignore[no-any-return]


def test_a_model_whose_blocks_do_not_run_one_after_the_other_runs_whole() -> None:
    model = SomeOfItsBlocks()
    units = profile_units(model)
    (phase,) = dry_run(model, units, Workload(), CPU, example=((torch.ones(2, 8),), {}))
    assert [units[index].name for index in phase.trace.order()] == ["blocks.2", "blocks.0"]


@pytest.mark.slow
def test_the_unit_that_allocated_a_tensor_is_that_of_its_last_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scan of all events, which takes longer the more there are."""

    def scanned(recorder: Recorder, tensor: torch.Tensor) -> int:
        unit, running, number = OUTSIDE, OUTSIDE, recorder.number_of(tensor)
        for event in recorder.events:
            if isinstance(event, Enter):
                running = event.unit
            elif isinstance(event, Leave):
                running = OUTSIDE
            elif isinstance(event, Allocate) and event.storage == number:
                unit = running
        return unit

    found: list[int] = []
    fast = Recorder.as_unit_of

    def compared(recorder: Recorder, tensor: torch.Tensor) -> Any:
        found.append(scanned(recorder, tensor))
        assert recorder._unit_at(recorder._allocated_at.get(recorder.number_of(tensor), 0)) == found[-1]
        return fast(recorder, tensor)

    monkeypatch.setattr(Recorder, "as_unit_of", compared)
    model, names = _family("mixtral")
    assert list(run(model, Workload(2, 33, None))) == names
    assert len({*found} - {OUTSIDE}) == 2  # the layers' caches are made as long as they are at the end

"""Dispatched models train through the Accelerator as the resident model does, in less device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import save_model
from bigmodel.devices import max_memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model, load_checkpoint_and_dispatch
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import TrainError
from bigmodel.profile.training.memory import training_memory
from bigmodel.train import Accelerator
from bigmodel.train.dispatched import check_one_process, check_quantized
from tests.dispatch.models import llama, stack
from tests.examples import alike
from tests.train.multiprocess import fresh_states

TOKENS = torch.randint(0, 64, (4, 2, 8), generator=torch.Generator().manual_seed(0))
LARGE = torch.randint(0, 64, (2, 16, 16), generator=torch.Generator().manual_seed(0))
DEEP = 8
"""Layers of a model of which a few layers, with their activations, are a small part."""


@pytest.fixture(autouse=True)
def _on_the_virtual_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    virtual.enable(count=1)
    yield
    virtual.disable()


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: torch.Tensor = TOKENS) -> list[float]:
    """Train on token batches and return the losses."""
    losses = []
    for tokens in batches:
        with accelerator.accumulate(model):
            inputs = tokens.to(accelerator.device)
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def resident(
    layers: int = 2, adapt: Callable[[nn.Module], nn.Module] = nn.Module.train, steps: int = 4, **options: Any
) -> list[float]:
    """The losses of the model that lies on the accelerator as a whole."""
    fresh_states()
    accelerator = Accelerator(**options)
    model = adapt(llama(layers).train())
    losses = train(accelerator, *accelerator.prepare(model, adam(model)), TOKENS[:steps])
    fresh_states()
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def from_disk(folder: Path, device_map: Any, layers: int = 2, **options: Any) -> nn.Module:
    save_model(llama(layers), folder)
    model = llama(layers).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return load_checkpoint_and_dispatch(model, folder, device_map=device_map, **options)


@pytest.mark.slow
@alike("options", [{}, {"gradient_accumulation_steps": 2}], first=1)
def test_all_weights_are_trained_with_their_optimizer_s_state_on_the_host(options: dict[str, Any]) -> None:
    expected = resident(**options)
    accelerator = Accelerator(**options)
    assert accelerator.device.type == "virtual"
    model = dispatch_model(llama(2).train(), {"": "cpu"}, main_device=0)
    optimizer: Any = adam(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert train(accelerator, model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_trained_within_its_budget() -> None:
    layers = 9  # half of the weights hold the parts outside the blocks, two blocks and their activations
    expected = resident(layers, steps=2)
    weights = sum(p.nbytes for p in llama(layers).parameters())
    budget = weights // 2  # resident training takes four times the weights
    virtual.enable(count=1, capacity=budget)
    accelerator = Accelerator()
    device_map = {"": 0, **{f"model.layers.{i}": "cpu" for i in range(2, layers)}}
    model = dispatch_model(llama(layers).train(), device_map, max_memory={0: budget, "cpu": "1GiB"})
    model, optimizer = accelerator.prepare(model, adam(model))
    reset_peak_memory(0)
    assert train(accelerator, model, optimizer, TOKENS[:2]) == pytest.approx(expected, rel=1e-5)
    assert max_memory_allocated(0) <= budget


def streamed_peak(layers: int, adapt: Callable[[nn.Module], nn.Module]) -> tuple[int, int]:
    """Train a model that lies on the host; return the accelerator's peak, and what of it weights on their way took."""
    fresh_states()
    accelerator = Accelerator()
    model = adapt(llama(layers).train())
    model, optimizer = accelerator.prepare(dispatch_model(model, {"": "cpu"}, main_device=0), adam(model))
    reset_peak_memory(0)
    train(accelerator, model, optimizer, LARGE)
    found = dispatched(model)
    assert found is not None
    return max_memory_allocated(0), sum(streamer.slot_bytes for streamer in found.streamers)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("adapt", [nn.Module.train, lora], ids=["full", "lora"])
def test_the_peak_is_what_two_blocks_need_and_the_input_of_each(adapt: Callable[[nn.Module], nn.Module]) -> None:
    """A block's activations are computed again in the backward pass; the optimizer's state is on the host."""
    _, samples, tokens = LARGE.shape
    block_input = samples * tokens * llama(1).config.hidden_size * torch.float32.itemsize
    two = adapt(llama(2).train())
    two_blocks = training_memory(
        getattr(two, "get_base_model", lambda: two)(), samples, tokens, device_type="virtual"
    ).activations
    peaks = {}
    for layers in (2, 3):
        peaks[layers], slots = streamed_peak(layers, adapt)
        assert peaks[layers] <= slots + two_blocks + layers * block_input
    assert peaks[3] - peaks[2] == block_input


@pytest.mark.slow
def test_weights_on_disk_are_trained_in_memory_and_the_checkpoint_stays(tmp_path: Path) -> None:
    expected = resident()
    model = from_disk(tmp_path, {"": "disk"}, main_device="virtual:0")
    before = (tmp_path / "model.safetensors").read_bytes()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, adam(model))
    assert train(accelerator, model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("home", "adapted"), [("cpu", "before"), ("disk", "after")])
def test_adapters_of_a_frozen_base_are_trained(tmp_path: Path, home: str, adapted: str) -> None:
    expected = resident(DEEP, lora, steps=2)
    accelerator = Accelerator()
    if adapted == "before":
        whole = lora(llama(DEEP).train())
        model = dispatch_model(whole, {"": home}, main_device="virtual:0", offload_dir=tmp_path)
    else:
        model = lora(from_disk(tmp_path, {"": home}, DEEP, main_device="virtual:0"))
    reset_peak_memory(0)
    model, optimizer = accelerator.prepare(model, adam(model))
    assert train(accelerator, model, optimizer, TOKENS[:2]) == pytest.approx(expected, rel=1e-6)
    assert max_memory_allocated(0) < sum(p.nbytes for p in model.parameters()) // 2
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.slow
def test_an_optimizer_prepared_later_follows_weights_that_move() -> None:
    expected = resident()
    weights = sum(p.nbytes for p in llama(2).parameters())
    virtual.enable(count=1, capacity=2 * weights)
    accelerator = Accelerator()
    model = dispatch_model(llama(2).train(), {"": 0, "model.layers.1": "cpu"})
    optimizer = adam(model)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert train(accelerator, model, optimizer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_it_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    def build() -> tuple[Accelerator, nn.Module, Any]:
        fresh_states()
        accelerator = Accelerator()
        model = dispatch_model(llama(2).train(), {"": "cpu"}, main_device=0)
        return accelerator, *accelerator.prepare(model, adam(model))

    run = build()
    train(*run, TOKENS[:2])
    run[0].save_state(tmp_path / "state")
    rest = train(*run, TOKENS[2:])
    again = build()
    again[0].load_state(tmp_path / "state")
    assert train(*again, TOKENS[2:]) == rest
    again[0].save_model(again[1], tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_a_model_prepared_only_to_be_used_is_not_moved(tmp_path: Path) -> None:
    model = from_disk(tmp_path, {"": "disk"}, main_device="virtual:0")
    Accelerator().prepare(model)
    assert set(model.hf_device_map.values()) == {"disk"}


def test_what_does_not_fit_the_host_is_refused(tmp_path: Path) -> None:
    budget = {0: "1GiB", "cpu": "100KiB", "disk": "1GiB"}
    model = from_disk(tmp_path, {"": "disk"}, main_device="virtual:0", max_memory=budget)
    with pytest.raises(TrainError, match="trained parameter lies on disk"):
        Accelerator().prepare(model, adam(model))


def test_several_processes_cannot_share_one() -> None:
    streamed = dispatch_model(llama(2), {"": "cpu"}, main_device=0)
    check_one_process(streamed, several=False, over_devices=True)
    check_one_process(llama(2), several=True, over_devices=False)
    with pytest.raises(TrainError, match="cannot be trained by several processes"):
        check_one_process(streamed, several=True, over_devices=False)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_quantised_parts_that_bitsandbytes_cannot_compute_with_are_refused(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model = nn.Linear(2, 2)
    model.is_loaded_in_4bit, model.hf_device_map = True, {"": place}
    monkeypatch.setattr("bigmodel.accelerator.is_bitsandbytes_multi_backend_available", lambda: False)
    with pytest.raises(TrainError, match="CPU or disk offload"):
        Accelerator().prepare(model)
    model.hf_device_map = {"": 0}
    check_quantized(model)


def test_quantised_parts_on_the_host_train_where_bitsandbytes_computes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model.is_loaded_in_8bit, model.hf_device_map = True, {"": "cpu"}
    monkeypatch.setattr("bigmodel.accelerator.is_bitsandbytes_multi_backend_available", lambda: True)
    check_quantized(model)
    monkeypatch.setattr("bigmodel.accelerator.is_xpu_available", lambda: True)
    with pytest.raises(TrainError, match="CPU or disk offload"):
        check_quantized(model)


def test_tied_weights_on_two_devices_are_refused_also_without_an_optimizer() -> None:
    """An optimizer that is not prepared would train them apart."""
    virtual.enable(count=2)
    model = dispatch_model(stack().train(), {"": 0, "head": 1})
    for prepare in (Accelerator().prepare, Accelerator().prepare_model):
        with pytest.raises(TrainError, match=r"embed.weight and head.weight were one tied weight.*trained apart"):
            prepare(model)
    assert Accelerator().prepare_model(model, evaluation_mode=True) is model
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    assert Accelerator().prepare(model) is model

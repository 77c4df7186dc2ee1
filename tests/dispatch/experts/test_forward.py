"""Mixtures of experts whose experts are offloaded: only the chosen ones come, and the outputs are the same bits."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bigmodel.devices import memory_allocated, virtual
from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.experts.cache import ExpertCache
from bigmodel.limits import MOST_GROUPS
from tests.preloaded import run

from ...accelerators import at, two
from ...examples import alike, some
from ..mixtures import EXPERT_BYTES, LAYERS, chosen_by, deepseek_v3, experts_of, mixtral, qwen2_moe, qwen3_moe, tokens

IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]
CACHES = [None, 1, 4 * EXPERT_BYTES, 1 << 30]
pytestmark = pytest.mark.usefixtures("every_accelerator")


def logits(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs).logits.cpu()


def resident(build: Callable[[], nn.Module], implementation: str = "grouped_mm") -> nn.Module:
    model = build()
    model.set_experts_implementation(implementation)
    return model.to(at(0))


def offloaded(build: Callable[[], nn.Module], implementation: str = "grouped_mm", **options: object) -> nn.Module:
    model = build()
    model.set_experts_implementation(implementation)
    return dispatch_model(model, {"": "cpu"}, main_device=at(0), **options)


def stats(model: nn.Module) -> dict[str, float]:
    return model.dispatch_stats()["experts"][at(0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "implementation"),
    [
        (qwen3_moe, "batched_mm"),
        pytest.param(qwen2_moe, "grouped_mm", marks=pytest.mark.long),
        pytest.param(deepseek_v3, "eager", marks=pytest.mark.long),
        *((mixtral, implementation) for implementation in some(IMPLEMENTATIONS, first=0)),
    ],
)
def test_outputs_are_those_of_the_resident_model(build: Callable[[], nn.Module], implementation: str) -> None:
    expected = resident(build, implementation)
    prompt = tokens().to(at(0))
    found = logits(expected, prompt)
    for cache in CACHES if (build, implementation) == (mixtral, IMPLEMENTATIONS[0]) else (None, 4 * EXPERT_BYTES):
        model = offloaded(build, implementation, expert_cache=cache)
        assert torch.equal(logits(model, tokens()), found), cache
        if cache == 4 * EXPERT_BYTES:
            text = expected.generate(prompt[:, :3], max_new_tokens=2, do_sample=False).cpu()
            assert torch.equal(model.generate(tokens()[:, :3], max_new_tokens=2, do_sample=False), text)


@pytest.mark.slow
def test_bytes_fetched_are_those_of_the_chosen_experts_and_nothing_else() -> None:
    inputs = [tokens(1) + n for n in range(5)]
    chosen = chosen_by(mixtral(), *inputs)
    model = offloaded(mixtral, expert_cache=1 << 30)
    link = virtual.link(0)
    seen: set[tuple[int, int]] = set()
    for number, tensor in enumerate(inputs):
        before, streamed = stats(model)["bytes_fetched"], model.dispatch_stats()[at(0)]["bytes_from_ram"]
        crossed = link.bytes_to_device
        logits(model, tensor)
        new = {(layer, e) for layer in range(LAYERS) for e in chosen[LAYERS * number + layer]} - seen
        seen |= new
        fetched = stats(model)["bytes_fetched"] - before
        assert fetched == len(new) * EXPERT_BYTES
        # What crossed the link beside experts and streamed blocks is a few token ids and indices.
        streamed = model.dispatch_stats()[at(0)]["bytes_from_ram"] - streamed
        assert 0 <= link.bytes_to_device - crossed - fetched - streamed < 4096
    assert stats(model)["misses"] == len(seen)
    assert stats(model)["hits"] == sum(len(experts) for experts in chosen) - len(seen)


@pytest.mark.slow
def test_without_room_for_hot_experts_each_token_fetches_just_what_it_chose() -> None:
    inputs = [tokens(1) + n for n in range(4)]
    chosen = chosen_by(mixtral(), *inputs)
    model = offloaded(mixtral, expert_cache=EXPERT_BYTES)
    for tensor in inputs:
        logits(model, tensor)
    assert stats(model)["bytes_fetched"] == sum(len(experts) for experts in chosen) * EXPERT_BYTES


@pytest.mark.slow
def test_the_cache_holds_its_budget_and_the_rest_of_the_layer_streams_beside_it() -> None:
    model = offloaded(mixtral, expert_cache=4 * EXPERT_BYTES)
    logits(model, tokens())
    assert stats(model)["cache_bytes"] == 4 * EXPERT_BYTES
    streamed = model.dispatch_stats()[at(0)]["bytes_from_ram"]
    layers = sum(p.nbytes for n, p in model.model.layers.named_parameters() if "experts" not in n)
    head = model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    # Beside each layer once, the first one or two of the next round may have been fetched ahead.
    assert layers + head <= streamed <= 2 * (layers + head)


def test_by_default_experts_take_no_more_than_streaming_their_layers_would() -> None:
    model = offloaded(mixtral)
    assert stats(model)["cache_bytes"] == 2 * 8 * EXPERT_BYTES


@pytest.mark.slow
def test_experts_alone_can_be_offloaded() -> None:
    device_map = {"": 0, **{f"model.layers.{n}.mlp.experts": "cpu" for n in range(LAYERS)}}
    model = dispatch_model(mixtral(), device_map, expert_cache=6 * EXPERT_BYTES)
    assert torch.equal(logits(model, tokens()), logits(resident(mixtral), tokens().to(at(0))))
    assert str(model.model.layers[0].self_attn.q_proj.weight.device) == at(0)
    assert set(model.dispatch_stats()) == {"experts"}


@pytest.mark.slow
@two
def test_experts_run_where_their_layer_lives_each_device_with_a_cache_of_its_own() -> None:
    layers = {f"model.layers.{n}": n for n in range(LAYERS)}
    device_map = {"": 0, **layers, **{f"model.layers.{n}.mlp.experts": "cpu" for n in range(LAYERS)}}
    model = dispatch_model(mixtral(), device_map)
    assert torch.equal(logits(model, tokens()), logits(resident(mixtral), tokens().to(at(0))))
    assert set(model.dispatch_stats()["experts"]) == {at(0), at(1)}


def test_parameters_stay_on_the_host_readable_during_and_after_a_forward() -> None:
    model = offloaded(mixtral)
    weights = experts_of(model, 1).gate_up_proj
    seen: list[torch.Tensor] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: seen.append(experts_of(model, 1).gate_up_proj))
    logits(model, tokens())
    assert seen[0] is experts_of(model, 1).gate_up_proj is weights
    assert torch.equal(weights, experts_of(mixtral(), 1).gate_up_proj)


@pytest.mark.slow
def test_changed_and_replaced_weights_are_seen_by_the_next_forward() -> None:
    model, expected = offloaded(mixtral, expert_cache=1 << 30), resident(mixtral)
    logits(model, tokens())
    with torch.no_grad():
        for changed in (model, expected):
            experts_of(changed, 0).down_proj[2] *= 2
            experts_of(changed, 0).down_proj.mul_(0.5)
    experts_of(model, 1).gate_up_proj = nn.Parameter(experts_of(model, 1).gate_up_proj.detach() + 1)
    experts_of(expected, 1).gate_up_proj = nn.Parameter(experts_of(expected, 1).gate_up_proj.detach() + 1)
    assert torch.equal(logits(model, tokens()), logits(expected, tokens().to(at(0))))


@pytest.mark.slow
@alike(("implementation", "slots"), [("batched_mm", 3), ("eager", 16), ("grouped_mm", 1)], first=1)
def test_threads_share_the_cache(implementation: str, slots: int) -> None:
    expected = resident(mixtral, implementation)
    inputs = [(tokens(count) + count) % 64 for count in (1, 2, 5, 9)]
    outputs = [logits(expected, tensor.to(at(0))) for tensor in inputs]
    model = offloaded(mixtral, implementation, expert_cache=slots * EXPERT_BYTES)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(2):
            which = (number + turn) % len(inputs)
            if not torch.equal(logits(model, inputs[which]), outputs[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
@alike("implementation", ["batched_mm", "grouped_mm", "eager"], first=1)
def test_an_exception_among_the_experts_leaves_nothing_held(implementation: str) -> None:
    model = offloaded(mixtral, implementation, expert_cache=2 * EXPERT_BYTES)
    expected = logits(model, tokens())
    held = memory_allocated(0)

    def fail(*_: object) -> None:
        raise ValueError("asked to fail")

    failing = experts_of(model, 1).act_fn.register_forward_hook(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="asked to fail"):
            logits(model, tokens())
    failing.remove()
    assert memory_allocated(0) == held
    assert torch.equal(logits(model, tokens()), expected)


@pytest.mark.virtual_only("a link that fails")
@pytest.mark.slow
def test_a_fetch_that_fails_is_raised_and_tried_again_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = offloaded(mixtral)
    transfer = virtual.VirtualLink.transfer

    def broken(self: object, copy: object, nbytes: int, *, to_device: bool) -> None:
        if nbytes in (EXPERT_BYTES // 3, 2 * EXPERT_BYTES // 3):
            raise OSError("the link is down")
        transfer(self, copy, nbytes, to_device=to_device)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(virtual.VirtualLink, "transfer", broken)
        with pytest.raises(OSError, match="the link is down"):
            logits(model, tokens())
    for _ in range(8):
        # What was on its way when the link broke is reported by the first forward that needs it, once.
        with contextlib.suppress(OSError):
            logits(model, tokens())
    assert torch.equal(logits(model, tokens()), logits(resident(mixtral), tokens().to(at(0))))


def test_undispatch_gives_the_plain_model_back() -> None:
    model = undispatch(offloaded(mixtral))
    assert "forward" not in experts_of(model, 0).__dict__
    assert torch.equal(logits(model, tokens()), logits(mixtral(), tokens()))


@pytest.mark.slow
def test_a_registered_experts_function_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        calls.append(module.num_experts)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "counted", counted)
    model = offloaded(mixtral, "counted", expert_cache=16 * EXPERT_BYTES)
    assert torch.equal(logits(model, tokens()), logits(resident(mixtral), tokens().to(at(0))))
    assert calls[:LAYERS] == [16] * LAYERS  # It works on the slots of the cache.


@pytest.mark.long
@pytest.mark.slow
def test_more_slots_than_one_call_can_take_are_used_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.dispatch.experts.forward.MOST_GROUPS", 5)
    assert MOST_GROUPS < 1024
    for build in (mixtral, qwen2_moe, deepseek_v3):
        model, expected = offloaded(build, expert_cache=1 << 30), logits(resident(build), tokens(9).to(at(0)))
        for _ in range(2):
            assert torch.equal(logits(model, tokens(9)), expected)


@pytest.mark.slow
def test_a_long_prompt_fetches_the_next_layer_ahead() -> None:
    model = offloaded(mixtral)
    long = torch.arange(64).view(1, 64)
    logits(model, long)
    counters = stats(model)
    assert all(len(experts) == 8 for experts in chosen_by(mixtral(), long))
    assert counters["misses"] == 8
    assert counters["hits"] == 8 * (LAYERS - 1)


class Transfers(TorchDispatchMode):
    """Appends to `events` each copy of the calling thread from the host to an accelerator."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        source = args[1] if function is torch.ops.aten.copy_.default else args[0] if args else None
        are_tensors = isinstance(source, torch.Tensor) and isinstance(output, torch.Tensor)
        if are_tensors and source.device.type == "cpu" != output.device.type:
            self.events.append("transfer")
        return output


@alike("slots", [16, 3], first=1)
def test_what_a_call_needs_on_the_device_is_copied_before_experts_are_fetched_ahead(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """A small copy waits on the link for whatever is queued before it."""
    events: list[str] = []

    def call(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        events.append("call")
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)

    fetch_ahead = ExpertCache.fetch_ahead

    def ahead(cache: ExpertCache, layer: Any, experts: Sequence[int]) -> None:
        events.extend(["ahead"] * bool(experts))
        fetch_ahead(cache, layer, experts)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "noted", call)
    monkeypatch.setattr(ExpertCache, "fetch_ahead", ahead)
    model = offloaded(mixtral, "noted", expert_cache=slots * EXPERT_BYTES)
    inputs = torch.arange(64).view(1, 64).to(at(0))
    with Transfers(events):
        logits(model, inputs)
    assert "transfer" in events
    begun = [number for number, event in enumerate(events) if event == "ahead"]
    assert len(begun) >= LAYERS - 1
    assert all("transfer" not in events[number : events.index("call", number)] for number in begun)


@pytest.mark.slow
def test_experts_cast_on_their_way_are_those_of_the_cast_model(tmp_path: Path) -> None:
    from bigmodel.dispatch.pretrained import from_pretrained

    mixtral().save_pretrained(tmp_path)
    expected = type(mixtral()).from_pretrained(tmp_path, dtype=torch.bfloat16).to(at(0))  # keeps buffers in float32
    model = from_pretrained(tmp_path, {"": 0, "model.layers": "disk"}, dtype=torch.bfloat16)
    assert torch.equal(logits(model, tokens()), logits(expected, tokens().to(at(0))))
    assert stats(model)["bytes_fetched"] % EXPERT_BYTES == 0


@pytest.mark.slow
def test_experts_on_disk_may_be_seen_first_in_inference_mode_and_later_without(tmp_path: Path) -> None:
    from bigmodel.dispatch.pretrained import from_pretrained

    mixtral().save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, {"": 0, "model.layers": "disk"}, expert_cache=1)
    with torch.inference_mode():
        first = model(tokens()).logits.cpu()
    assert torch.equal(logits(model, tokens()), first)
    assert torch.equal(first, logits(resident(mixtral), tokens().to(at(0))))


@pytest.mark.slow
def test_on_the_host_unchosen_experts_on_disk_are_not_touched(tmp_path: Path) -> None:
    """Their pages are made unreadable: touching one would end the process."""
    script = f"""
        import ctypes, mmap, torch
        from safetensors.torch import save_file
        from bigmodel.checkpoint import Checkpoint
        from bigmodel.dispatch import dispatch_model
        from tests.dispatch.mixtures import chosen_by, experts_of, mixtral, tokens

        torch.set_num_threads(1)
        for implementation in {IMPLEMENTATIONS!r}:
            file = {str(tmp_path)!r} + "/" + implementation + ".safetensors"
            model = mixtral(hidden_size=64, intermediate_size=128, num_hidden_layers=3)  # more than are copied at once
            model.set_experts_implementation(implementation)
            chosen = chosen_by(model, tokens(1))
            expected = model(tokens(1)).logits
            names = [f"model.layers.{{n}}.mlp.experts.{{p}}" for n in range(3) for p in ("gate_up_proj", "down_proj")]
            save_file({{n: model.get_parameter(n).detach().clone() for n in names}}, file)
            checkpoint = Checkpoint.open(file)
            for name in names:
                module, _, key = name.rpartition(".")
                model.get_submodule(module)._parameters[key] = torch.nn.Parameter(checkpoint.tensor(name))
            device_map = {{"": "cpu", **{{name.rpartition(".")[0]: "disk" for name in names}}}}
            dispatch_model(model, device_map)
            libc = ctypes.CDLL(None)
            protected = 0
            for layer in range(3):
                for weights in experts_of(model, layer).parameters():
                    for expert in set(range(8)) - chosen[layer]:
                        begin = -(-weights[expert].data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
                        end = (weights[expert].data_ptr() + weights[expert].nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                        assert libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 0) == 0
                        protected += 1
            assert protected == 3 * 2 * 6
            with torch.no_grad():
                assert torch.equal(model(tokens(1)).logits, expected)
    """
    done = run(["-c", textwrap.dedent(script)])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_experts_that_are_written_to_past_their_version_counters_are_fetched_again(replaces: bool) -> None:
    both = resident(mixtral), offloaded(mixtral, expert_cache=1 << 30)
    for model in both:
        logits(model, tokens().to(at(0)))
        for parameter in experts_of(model, 0).parameters():
            if replaces:
                parameter.data = parameter.data * 1.5
            else:
                parameter.data.mul_(1.5)
    expected, found = (logits(model, tokens().to(at(0))) for model in both)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.virtual_only("counts waits")
def test_the_host_waits_once_in_each_layer_for_the_routers_choice() -> None:
    """Which experts are to be fetched from the host is decided on the device: the host must know it, once."""
    model = mixtral()
    model.set_experts_implementation("grouped_mm")
    layers, inputs = model.config.num_hidden_layers, tokens().to(at(0))
    on_host = {f"model.layers.{layer}.mlp.experts": "cpu" for layer in range(layers)}
    dispatch_model(model, {"": at(0), **on_host}, main_device=at(0), expert_cache=1 << 30)

    def waits(model: nn.Module) -> int:
        with torch.no_grad():
            model(inputs)
            before = virtual.host_waits()
            model(inputs)
        return virtual.host_waits().since(before).copies_to_host

    assert waits(model) == waits(resident(mixtral)) + layers

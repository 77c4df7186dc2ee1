"""Keys and values on the host: the same bits as on the device, within the plan's bytes."""

from __future__ import annotations

import copy
import errno
import gc
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.dispatch.attach.host_kv_cache import HostKVLayer, KVOnHost
from bigmodel.dispatch.streaming.host_kv import KVFetchers
from bigmodel.errors import DispatchError
from bigmodel.plan import Plan, plan
from bigmodel.plan.memory.host_kv import rows_on_disk
from bigmodel.profile import Profile, profile_model
from bigmodel.verify.planned_use import planned_use
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly

from ...examples import alike
from ..models import llama

pytestmark = pytest.mark.usefixtures("accelerators")

LAYERS, NEW_TOKENS = 5, 2


def model() -> Any:
    return llama(LAYERS, hidden_size=64, intermediate_size=64, num_key_value_heads=2, vocab_size=96)


@cache
def profile() -> Profile:
    return profile_model(model(), context_length=56, new_tokens=4, device_type="virtual")


def on_device() -> Any:
    """The slow twin: all keys and values on the device."""
    return dispatch_model(model(), {"": 0})


@cache
def expected() -> Any:
    """Return what the slow twin generates."""
    return generated(on_device())


def with_kv_on_host(names: set[str] | None = None) -> Plan:
    """Return a plan that has everything on the device but the keys and values of some layers; None: of all."""
    found = plan(profile(), {0: 10**8, "cpu": 10**9})
    chosen = {f"model.layers.{index}" for index in range(LAYERS)} if names is None else names
    parts = tuple(replace(part, kv_on_host=part.name in chosen) for part in found.parts)
    return replace(found, parts=parts, kv_slots=2)


def generated(found: Any, **options: Any) -> Any:
    ids = torch.arange(54)[None] % 90
    keys = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, **options}
    with torch.inference_mode():
        return found.generate(ids.to("virtual:0"), max_new_tokens=NEW_TOKENS, **keys)


def assert_equal(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences.cpu(), expected.sequences.cpu())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found.logits, expected.logits, strict=True))
    for one, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(one.keys.cpu(), other.keys.cpu())
        assert torch.equal(one.values.cpu(), other.values.cpu())


@pytest.mark.slow
@alike("names", [None, {"model.layers.0", "model.layers.3"}, {"model.layers.1"}], first=1)
def test_tokens_logits_and_cache_are_those_of_a_cache_on_the_device(names: set[str] | None) -> None:
    found = generated(dispatch_model(model(), with_kv_on_host(names)))
    kinds = [isinstance(layer, HostKVLayer) for layer in found.past_key_values.layers]
    assert kinds == [names is None or f"model.layers.{at}" in names for at in range(LAYERS)]
    assert_equal(found, expected())


@pytest.mark.slow
def test_beams_are_reordered_as_on_the_device() -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert_equal(generated(dispatch_model(model(), with_kv_on_host()), **options), generated(on_device(), **options))


def continued(found: Any, past: Any, change: Any) -> torch.Tensor:
    """Return the logits of two calls, with a change of the cache between them."""
    with torch.inference_mode():
        found(torch.arange(20)[None].to("virtual:0"), past_key_values=past)
        changed = change(past)
        past = past if changed is None else changed
        return found(torch.arange(7)[None].to("virtual:0"), past_key_values=past).logits.cpu()


@pytest.mark.slow
@alike("change", [lambda past: past.reset(), lambda past: past.crop(-5), copy.deepcopy], first=1)
def test_a_cache_may_be_changed_between_calls(change: Any) -> None:
    found = continued(dispatch_model(model(), with_kv_on_host()), DynamicCache(), change)
    assert torch.equal(found, continued(on_device(), DynamicCache(), change))


@pytest.mark.long
@pytest.mark.slow
def test_two_caches_in_turns_do_not_disturb_each_other() -> None:
    found, twin = dispatch_model(model(), with_kv_on_host()), on_device()
    ids = [torch.arange(9)[None], torch.arange(30, 50)[None]]
    pasts, wanted = [DynamicCache(), DynamicCache()], [DynamicCache(), DynamicCache()]
    with torch.inference_mode():
        for _ in range(3):
            for at in (0, 1):
                tokens = ids[at].to("virtual:0")
                got = found(tokens, past_key_values=pasts[at]).logits
                assert torch.equal(got.cpu(), twin(tokens, past_key_values=wanted[at]).logits.cpu())


def unpinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def layers_on_host(fetchers: KVFetchers, count: int) -> list[Any]:
    cache = DynamicCache()
    KVOnHost(fetchers, set(range(count)))(None, (cache,), {})
    return cache.layers


def test_what_another_accelerator_wrote_is_on_the_host_before_it_is_fetched() -> None:
    virtual.configure(0, bandwidth=1e7)  # the copy to the host takes 0.8 s
    (layer,) = layers_on_host(KVFetchers(1, 80, 1, unpinned), 1)
    first, new = torch.randn(1, 2, 60, 2**13), torch.randn(1, 2, 1, 2**13)
    layer.update(first.to("virtual:0"), first.to("virtual:0"))
    keys, values = layer.update(new.to("virtual:1"), new.to("virtual:1"))
    assert torch.equal(keys[:, :, :-1].cpu(), first)
    assert torch.equal(values[:, :, :-1].cpu(), first)


def test_what_another_accelerator_reads_is_not_fetched_ahead() -> None:
    fetchers = KVFetchers(2, 80, 1, unpinned)
    layers = layers_on_host(fetchers, 4)
    for tokens in (8, 1, 1, 1):
        for number, layer in enumerate(layers):
            new = torch.randn(1, 2, tokens, 32).to(f"virtual:{number % 2}")
            layer.update(new, new)
    # Each accelerator has a slot for each of its two layers.
    assert [each.bytes_from_ram for each in fetchers.stats()] == [0, 0]


@pytest.mark.slow
def test_gradients_to_an_earlier_call_are_refused() -> None:
    found = dispatch_model(model(), with_kv_on_host())
    past = DynamicCache()
    found(torch.arange(9)[None].to("virtual:0"), past_key_values=past)
    with pytest.raises(DispatchError, match=r"torch\.no_grad"):
        found(torch.arange(9)[None].to("virtual:0"), past_key_values=past)


def test_undispatching_leaves_no_hook() -> None:
    found: nn.Module = undispatch(dispatch_model(model(), with_kv_on_host()), "cpu")
    assert not any(module._forward_pre_hooks for module in found.modules())


@pytest.mark.slow
@alike("budget", [450_000, 460_000], first=1)
def test_the_peak_is_the_planned_one_and_within_the_budget(budget: int) -> None:
    found = plan(profile(), {0: budget, "cpu": 10**9})
    assert found.kv_on_host
    gc.collect()
    before = memory_allocated(0)
    loaded = dispatch_model(model(), found)
    reset_peak_memory(0)
    with torch.inference_mode():
        planned_use(loaded, found).whole()
    assert max_memory_allocated(0) - before == found.devices[0].total <= budget


@pytest.mark.long
@pytest.mark.slow
def test_a_prompt_in_chunks_attends_to_keys_and_values_on_the_host_within_the_plan() -> None:
    chunk = 16
    of = profile_model(
        model(), context_length=56, new_tokens=NEW_TOKENS, device_type="virtual", prefill_chunk_size=chunk
    )
    budget = 310_000
    found = plan(of, {0: budget, "cpu": 10**9})
    assert found.kv_on_host
    assert found.prefill_chunk_size == chunk
    options = {"prefill_chunk_size": chunk}
    assert_equal(generated(dispatch_model(model(), found)), generated(on_device(), **options))
    gc.collect()
    before = memory_allocated(0)
    loaded = dispatch_model(model(), found)
    reset_peak_memory(0)
    with torch.inference_mode():
        planned_use(loaded, found).whole()
    measured = max_memory_allocated(0) - before  # ends of chunks are a little shorter than is planned
    assert 0.99 * found.devices[0].total <= measured <= found.devices[0].total <= budget


def with_kv_on_disk(in_ram: int = 56 // 4) -> Plan:
    """Return a plan whose RAM holds a fourth of the context's keys and values, and the device none."""
    found = with_kv_on_host()
    row = max(profile().kv_cache) // found.context_length
    there = row * rows_on_disk(row // 2, found.context_length, in_ram)
    parts = tuple(replace(part, kv_on_disk=there if part.kv_on_host else 0) for part in found.parts)
    return replace(found, parts=parts, kv_in_ram=in_ram)


def on_disk(folder: Path, in_ram: int = 56 // 4) -> Any:
    return dispatch_model(model(), with_kv_on_disk(in_ram), offload_dir=folder)


def space_of(found: nn.Module) -> int:
    """Return the bytes that the files of keys and values take on the disk."""
    record = dispatched(found)
    assert record is not None
    assert record.kv is not None
    assert record.kv.older is not None
    return sum(file.space for file in record.kv.older.disk.files)


@pytest.mark.slow
@alike("in_ram", [14, 3, 40], first=1)
def test_older_keys_and_values_on_disk_change_no_bit(tmp_path: Path, in_ram: int) -> None:
    found = on_disk(tmp_path, in_ram)
    got = generated(found)
    rows = [each for layer in got.past_key_values.layers for each in layer.rows]
    assert all(each.on_disk and each.length - each.on_disk <= in_ram for each in rows)
    assert space_of(found) > 0
    assert_equal(got, expected())
    assert dispatched(found).stats()["kv"]["bytes_from_disk"] > 0  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.slow
def test_beams_of_older_tokens_on_disk_are_reordered_as_on_the_device(tmp_path: Path) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert_equal(generated(on_disk(tmp_path), **options), generated(on_device(), **options))


@pytest.mark.slow
@alike(
    "change",
    [lambda past: past.reset(), lambda past: past.crop(-14), copy.deepcopy, lambda past: past.crop(-5)],
    first=1,
)
def test_a_cache_with_older_tokens_on_disk_may_be_changed_between_calls(tmp_path: Path, change: Any) -> None:
    found = continued(on_disk(tmp_path, in_ram=8), DynamicCache(), change)
    assert torch.equal(found, continued(on_device(), DynamicCache(), change))


@pytest.mark.slow
def test_the_file_has_no_name_and_its_space_is_given_back_with_the_cache(tmp_path: Path) -> None:
    found = on_disk(tmp_path)
    got = generated(found)
    assert not os.listdir(tmp_path)
    assert space_of(found) > 0
    del got
    gc.collect()
    assert space_of(found) == 0


class Stopped(Exception):
    """What a user's streamer raises in the middle of a text."""


@pytest.mark.slow
def test_nothing_is_left_on_disk_after_an_error_in_the_middle_of_a_text(tmp_path: Path) -> None:
    found, seen = on_disk(tmp_path), []

    class Stopping:
        def put(self, value: object) -> None:
            seen.append(space_of(found))
            if len(seen) > 2:
                raise Stopped

    with pytest.raises(Stopped):
        found.generate(torch.arange(52)[None].to("virtual:0"), max_new_tokens=4, streamer=Stopping())
    assert seen[-1] > 0
    gc.collect()
    assert space_of(found) == 0
    assert not os.listdir(tmp_path)
    assert_equal(generated(found), expected())


@pytest.mark.slow
def test_a_full_disk_is_one_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = on_disk(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DispatchError, match=r"keys and values cannot be written to disk \(No space left"):
        generated(found)
    monkeypatch.undo()
    assert_equal(generated(found), expected())


def test_keys_and_values_on_disk_need_a_folder() -> None:
    with pytest.raises(DispatchError, match="offload_dir"):
        dispatch_model(model(), with_kv_on_disk())


@pytest.mark.slow
def test_peaks_with_keys_and_values_on_disk_are_within_the_plan(tmp_path: Path) -> None:
    found = plan(profile(), {0: 450_000, "cpu": 200_000})
    assert found.kv_on_disk == found.devices["disk"].kv_cache > 0
    gc.collect()
    before = memory_allocated(0)
    loaded = dispatch_model(model(), found, offload_dir=tmp_path)
    reset_peak_memory(0)
    with torch.inference_mode():
        planned_use(loaded, found).whole()
    assert max_memory_allocated(0) - before == found.devices[0].total <= 450_000

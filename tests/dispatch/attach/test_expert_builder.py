"""Which experts of a model are fetched one by one, to where, and through how much memory."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import Dispatched, dispatched

from ...accelerators import at
from ..mixtures import mixtral

pytestmark = pytest.mark.usefixtures("every_accelerator")


def carried(device_map: dict[str, Any], **options: Any) -> Dispatched:
    found = dispatched(dispatch_model(mixtral(), device_map, **options))
    assert found is not None
    return found


def fetched(found: Dispatched) -> list[str]:
    return [layer.name for cache in found.expert_caches for layer in cache.layers]


def test_experts_of_offloaded_layers_are_fetched_one_by_one() -> None:
    found = carried({"": 0, "model.layers.1": "cpu"})
    assert fetched(found) == ["model.layers.1.mlp.experts"]
    assert found.attachments["model.layers.1.mlp.experts"].compute is not None


def test_resident_ones_are_left_alone() -> None:
    assert fetched(carried({"": 0})) == []


def test_layers_of_one_kind_share_a_cache_on_their_device() -> None:
    found = carried({"": 0, "model.layers": "cpu"})
    (cache,) = found.expert_caches
    assert str(cache.device) == at(0)
    assert len(cache.layers) > 1


@pytest.mark.parametrize("slots", [1, 3])
def test_the_cache_takes_what_it_may(slots: int) -> None:
    size = carried({"": "cpu"}, main_device=0).expert_caches[0].layers[0].layout.nbytes
    (cache,) = carried({"": "cpu"}, main_device=0, expert_cache=slots * size).expert_caches
    assert (cache.slots, cache.nbytes) == (slots, slots * size)


def test_their_weights_are_no_part_of_the_streamed_block() -> None:
    found = carried({"": 0, "model.layers.1": "cpu"})
    (streamer,) = found.streamers
    (block,) = streamer.blocks
    assert not any("experts" in tensor.name for tensor in block.tensors)
    assert len(block.nested) == len(found.expert_caches[0].layers[0].names)

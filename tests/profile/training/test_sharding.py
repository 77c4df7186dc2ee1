from __future__ import annotations

import pytest

from bigmodel.profile.training.sharding import BACKWARD, FORWARD, LOSS, OPTIMIZER, PHASES, REDUCING, sharding_of

from ..models import tiny_llama

MODEL = tiny_llama()
BLOCK = sum(parameter.nbytes for parameter in MODEL.model.layers[0].parameters())
WHOLE = sum(parameter.nbytes for parameter in MODEL.parameters())
REST = WHOLE - BLOCK * len(MODEL.model.layers)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_keeps_everything_and_communicates_nothing(strategy: str) -> None:
    alone = sharding_of(MODEL, 1, strategy)
    assert alone.share(7) == 7
    assert {alone.held_in(phase) for phase in PHASES} == {0}


def test_under_ddp_there_is_a_bucket_for_every_gradient() -> None:
    assert sharding_of(MODEL, 4, "ddp").held_in(OPTIMIZER) == WHOLE
    assert sharding_of(MODEL, 4, "ddp").share(8) == 8


def test_under_fsdp_blocks_are_whole_one_at_a_time_and_the_rest_all_the_time() -> None:
    sharding = sharding_of(MODEL, 4, "fsdp")
    assert sharding.share(9) == 3
    assert sharding.held_in(FORWARD) == REST + BLOCK
    assert sharding.held_in(LOSS) == REST + BLOCK
    assert sharding.held_in(BACKWARD) == REST + 2 * BLOCK
    assert sharding.held_in(REDUCING) == REST + 4 * BLOCK
    assert sharding.held_in(OPTIMIZER) == 0

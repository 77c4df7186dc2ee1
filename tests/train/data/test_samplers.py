"""Shuffling by seed and epoch, or in the order process 0 would draw."""

from __future__ import annotations

import torch
from torch.utils.data import BatchSampler, RandomSampler

from bigmodel.train import SeedableRandomSampler
from bigmodel.train.data.samplers import SharedOrder, SkipBatchSampler, shared_number


def test_an_epoch_s_order_depends_on_seed_plus_epoch_alone() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=5)
    first = list(sampler)
    sampler.set_epoch(3)
    torch.manual_seed(99)
    third = list(sampler)
    other = SeedableRandomSampler(range(20), data_seed=8)
    assert sorted(first) == sorted(third) == list(range(20))
    assert first != third
    assert list(other) == third


def test_a_finished_pass_advances_the_epoch_and_an_abandoned_one_does_not() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=5)
    passes = [list(sampler) for _ in range(3)]
    assert passes == [list(SeedableRandomSampler(range(20), data_seed=seed)) for seed in (5, 6, 7)]
    next(iter(sampler))
    assert sampler.epoch == 3
    sampler.set_epoch(0)
    assert list(sampler) == passes[0]


def test_the_seed_is_the_global_generator_s_by_default() -> None:
    torch.manual_seed(41)
    assert SeedableRandomSampler(range(3)).initial_seed == 41


def test_a_shared_order_is_what_the_sampler_would_draw_by_itself() -> None:
    torch.manual_seed(7)
    expected = list(RandomSampler(range(30)))
    after = torch.rand(())
    torch.manual_seed(7)
    sampler = RandomSampler(range(30))
    SharedOrder(sampler)()
    assert list(sampler) == expected
    assert torch.rand(()) == after


def test_one_process_keeps_its_number() -> None:
    assert shared_number(12) == 12


def test_skip_batch_sampler_leaves_out_the_first() -> None:
    sampler = SkipBatchSampler(BatchSampler(range(7), 2, False), 2)
    assert list(sampler) == [[4, 5], [6]]
    assert len(sampler) == 2

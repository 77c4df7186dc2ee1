"""Where a loader is, and the same order drawn again."""

from __future__ import annotations

import torch

from bigmodel.train.data.progress import Progress


def draw(progress: Progress, skip: int = 0) -> list[int]:
    with progress.begin(skip):
        return torch.randperm(100).tolist()


def test_an_interrupted_pass_draws_its_order_again() -> None:
    torch.manual_seed(0)
    progress = Progress([])
    order = draw(progress)
    with progress.running():
        progress.batches = 3
        state = progress.state_dict()
    following = torch.rand(1)

    torch.manual_seed(9)
    again = Progress([])
    again.load_state_dict(state)
    assert again.resumable
    now = torch.get_rng_state()
    assert draw(again, skip=3) == order
    assert torch.equal(torch.get_rng_state(), now)  # the training's own draws are not disturbed
    assert (again.batches, again.resumable) == (3, False)
    assert not torch.equal(torch.rand(1), following)


def test_a_pass_that_was_given_up_is_taken_up_only_by_skipping() -> None:
    torch.manual_seed(0)
    progress = Progress([])
    order = draw(progress)
    state = progress.state_dict()
    for skip, same in ((0, False), (1, True)):
        torch.manual_seed(9)
        again = Progress([])
        again.load_state_dict(state)
        assert (draw(again, skip) == order) is same


def test_a_finished_pass_leaves_only_its_number() -> None:
    generator = torch.Generator().manual_seed(4)
    progress = Progress([generator])
    draw(progress)
    progress.finish()
    state = progress.state_dict()
    assert (state["epoch"], state["batches"], state["order"]) == (1, 0, None)
    expected = torch.rand(1, generator=generator)
    other = torch.Generator()
    again = Progress([other])
    again.load_state_dict(state)
    assert torch.equal(torch.rand(1, generator=other), expected)
    assert not again.resumable

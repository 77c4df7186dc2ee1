"""GradientState: one state for the Accelerator, optimizers, schedulers and loaders."""

from __future__ import annotations

import pytest

from bigmodel.train import GradientAccumulationPlugin, GradientState


class Loader:
    def __init__(self, end: bool, remainder: int) -> None:
        self.end_of_dataloader, self.remainder = end, remainder

    def count_real(self, length: int) -> int:
        return length


def test_it_begins_outside_of_any_loader_with_one_step() -> None:
    state = GradientState()
    assert (state.sync_gradients, state.num_steps, state.in_dataloader) == (True, 1, False)
    assert (state.end_of_dataloader, state.remainder, state.active_dataloader) == (False, -1, None)


def test_the_plugin_is_shared_and_can_be_replaced() -> None:
    first = GradientState(GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False))
    assert (GradientState().num_steps, first.adjust_scheduler, first.sync_with_dataloader) == (3, False, True)
    assert first.plugin_kwargs == {"num_steps": 3, "adjust_scheduler": False}
    GradientState(GradientAccumulationPlugin(num_steps=2))
    assert first.num_steps == 2


@pytest.mark.parametrize(("launched", "synced"), [(None, False), ("false", False), ("true", True)])
def test_gradients_of_xla_are_synced_with_fsdp_only(
    launched: str | None, synced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", launched)
    assert GradientState().is_xla_gradients_synced is synced


def test_the_innermost_loader_is_the_active_one() -> None:
    state, outer, inner = GradientState(), Loader(False, 3), Loader(True, 5)
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (inner, True, 5)
    state._remove_dataloader(inner)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (outer, False, 3)
    state._remove_dataloader(inner)
    assert state.dataloader_references == [outer]
    assert "Extra samples" in repr(state)

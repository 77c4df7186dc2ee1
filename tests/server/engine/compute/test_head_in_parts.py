"""The output layer computes a few rows at once, and its logits are kept on the host."""

from __future__ import annotations

import pytest
import torch

from bigmodel.server.engine.compute.head_in_parts import head_in_parts
from tests.server.encoders import encoder
from tests.server.tiny import tiny_model


def test_logits_are_those_of_all_rows_at_once() -> None:
    model, ids, asked = tiny_model(), torch.tensor([[3, 1, 4, 1, 5]]), []
    model.lm_head.register_forward_hook(lambda _, args, __: asked.append(args[0].shape[1]))
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        forward = model.lm_head.forward

        def counted(states: torch.Tensor) -> torch.Tensor:
            asked.append(states.shape[1])
            logits: torch.Tensor = forward(states)
            return logits

        model.lm_head.forward = counted
        with head_in_parts(model, 2):
            torch.testing.assert_close(model(input_ids=ids).logits, whole)
        assert model.lm_head.forward is counted
    assert asked == [5, 2, 2, 1, 5]  # hooks see one call


def test_nothing_is_left_behind_also_after_an_error() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="broken"), head_in_parts(model, 1):
        raise RuntimeError("broken")
    assert "forward" not in vars(model.lm_head)


def test_a_model_without_an_output_layer_computes_as_ever() -> None:
    with head_in_parts(encoder(), 1):
        pass

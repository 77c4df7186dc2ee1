"""States before the output layer are taken of some rows; it computes logits of others."""

from __future__ import annotations

import pytest
import torch

from bigmodel.errors import ServeError
from bigmodel.server.engine.compute.hidden import output_layer, taking_states
from tests.server.encoders import encoder, states
from tests.server.tiny import tiny_model

TOKENS = [3, 1, 4, 1, 5]


def test_states_and_logits_are_of_the_rows_asked_for() -> None:
    model = tiny_model()
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([TOKENS])).logits[0]
        with taking_states(model, [4, 0], [2, 1]) as taken:
            logits = model(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, whole[[2, 1]])
    torch.testing.assert_close(taken.states, states(model, TOKENS)[[4, 0]])


def test_nothing_is_left_behind_also_after_an_error() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="broken"), taking_states(model, [0], [0]):
        raise RuntimeError("broken")
    assert not model.lm_head._forward_pre_hooks


def test_models_without_an_output_layer_say_so() -> None:
    assert output_layer(encoder()) is None
    with pytest.raises(ServeError, match="has no output layer"), taking_states(encoder(), [0], [0]):
        pass
    with taking_states(tiny_model(), [0], [0]) as taken, pytest.raises(ServeError, match="without its output layer"):
        _ = taken.states

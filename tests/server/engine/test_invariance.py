"""The measured row multiple makes a row's bits independent of how many rows there are."""

from __future__ import annotations

import logging

import pytest
import torch

from bigmodel.server.engine import invariance
from bigmodel.server.engine.invariance import CANDIDATES, probe_row_multiple
from tests.server.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_padded_to_the_multiple_a_row_is_the_same_in_any_company(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = tiny_model(dtype=dtype, hidden_size=256, intermediate_size=704)
        multiple = probe_row_multiple(model, torch.device("cpu"))
        assert multiple in CANDIDATES
        layer = model.model.layers[0].mlp.up_proj
        torch.manual_seed(1)
        rows = torch.randn(512, 256, dtype=dtype)
        with torch.inference_mode():
            whole = layer(rows)
            for count in (1, 2, 3, 5, 8, 13, 17, 33, 100, 129, 400):
                padded = rows[: -(-count // multiple) * multiple]
                assert torch.equal(layer(padded)[:count], whole[:count]), count
    finally:
        torch.set_num_threads(before)


def test_where_nothing_helps_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(invariance, "_invariant", lambda weight, multiple, linear: False)
    with caplog.at_level(logging.WARNING):
        assert probe_row_multiple(tiny_model(), torch.device("cpu")) == 1
    assert "independent of the batch" in caplog.text

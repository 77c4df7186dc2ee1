"""8-bit training with torchao: which layers are converted."""

from __future__ import annotations

import pytest
from torch import nn

from bigmodel.compat import float8


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.ReLU(), nn.Linear(16, 8))


def test_the_first_and_the_last_linear_layer_stay() -> None:
    assert float8.find_first_last_linear_layers(chain()) == ("0", "4")
    assert float8.find_first_last_linear_layers(nn.ReLU()) == (None, None)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    chosen = [float8.filter_first_and_last_linear_layers(model, name) for name in ("0", "1", "2")]
    assert chosen == [False, True, False]


def test_sizes_are_multiples_of_16() -> None:
    for sizes, converted in (((16, 32), True), ((8, 16), False), ((16, 24), False)):
        assert float8.filter_linear_layers(nn.Linear(*sizes), "x", []) is converted
    assert not float8.filter_linear_layers(nn.Linear(16, 16), "x", ["x"])


@pytest.mark.slow  # torchao is imported
def test_layers_are_replaced() -> None:
    pytest.importorskip("torchao")
    model = chain()
    assert not float8.has_ao_layers(model)
    float8.convert_model_to_fp8_ao(model)
    kinds = ["Linear", "Float8Linear", "Float8Linear", "ReLU", "Linear"]
    assert [type(layer).__name__ for layer in model] == kinds
    assert float8.has_ao_layers(model)
    model = chain()
    float8.convert_model_to_fp8_ao(model, module_filter_func=lambda _, name: name == "0")
    assert type(model[0]).__name__ == "Float8Linear"
    assert not float8.has_ao_layers(model[1:])


def test_without_torchao_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="has_ao_layers needs the package torchao"):
        float8.has_ao_layers(nn.ReLU())

"""Values of integer buffers that no checkpoint holds, of models on meta."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from torch import nn

from bigmodel.profile import profile_model
from bigmodel.profile.trace.initial_buffers import initial_buffers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("stride", torch.tensor(3), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)
        self.register_buffer("unwritten", torch.tensor(5), persistent=False)
        self.register_buffer("saved", torch.tensor(7))


class Model(nn.Module):
    """Initialises its layers as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Layer):
            module.weight.fill_(0.5)
            module.stride.fill_(3)
            module.saved.fill_(7)


def test_buffers_that_the_model_initialises_and_no_checkpoint_holds_have_their_values() -> None:
    with torch.device("meta"):
        model = Model()
    values = initial_buffers(model)
    assert values == {id(layer.stride): torch.tensor(3) for layer in model.layers}
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_weights_that_are_there_are_left_alone() -> None:
    model = Model()
    for layer in model.layers:
        layer.register_buffer("stride", torch.tensor(3, device="meta"), persistent=False)
    assert initial_buffers(model) == {}
    assert all(bool((layer.weight == 1).all()) for layer in model.layers)
    assert initial_buffers(nn.Linear(2, 2, device="meta")) == {}


def test_a_model_within_another_initialises_its_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.layer = Model(), Layer()

        def _init_weights(self, module: nn.Module) -> None:
            raise AttributeError("this model knows nothing of such a module")

    with torch.device("meta"):
        model = Outer()
    assert initial_buffers(model) == {id(layer.stride): torch.tensor(3) for layer in model.inner.layers}


@pytest.mark.long
@pytest.mark.slow
def test_a_codec_on_meta_is_planned_as_the_one_with_weights() -> None:
    config = t.EncodecConfig(num_filters=4, hidden_size=16, codebook_size=16, codebook_dim=16, num_lstm_layers=1)
    with torch.device("meta"):
        empty = t.EncodecModel(config).eval()
    profile, with_weights = profile_model(empty), profile_model(t.EncodecModel(config).eval())
    assert profile.activations == with_weights.activations > 0

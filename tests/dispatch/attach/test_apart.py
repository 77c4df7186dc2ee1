"""One line for models of one pipeline that lie whole on different accelerators, where nothing brings their inputs."""

from __future__ import annotations

import gc
import logging
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, undispatch
from bigmodel.dispatch.attach.dispatched import dispatched

from ...accelerators import at, two

pytestmark = [pytest.mark.usefixtures("every_accelerator"), two]


class Denoiser(nn.Linear):
    """A model of a pipeline."""


class Decoder(nn.Linear):
    """Another, which is given what the first computes."""


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr("bigmodel.dispatch.attach.apart._models", WeakKeyDictionary())  # without those of other tests
    caplog.set_level(logging.WARNING, "bigmodel")
    return caplog


def test_a_model_whole_on_another_accelerator_says_how_its_inputs_come_there(lines: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 4)
    denoiser, decoder = Denoiser(4, 4), Decoder(4, 4)
    expected = decoder(denoiser(x))
    dispatch_model(denoiser, {"": 0})
    assert not lines.messages
    dispatch_model(decoder, {"": 1})
    assert lines.messages == [
        f"Decoder lies whole on {at(1)}, so that nothing moves its inputs there, and Denoiser runs on {at(0)}: "
        "if one is given what the other has computed, dispatch Decoder with force_hooks=True"
    ]
    with pytest.raises(RuntimeError):
        decoder(denoiser(x.to(at(0))))

    lines.clear()
    dispatch_model(decoder, {"": 1}, force_hooks=True)
    assert not lines.messages
    found = decoder(denoiser(x.to(at(0))))
    assert str(found.device) == at(0)
    assert torch.allclose(found.cpu(), expected)


@pytest.mark.parametrize("first", ["whole", "streamed"])
def test_the_line_names_the_model_that_has_nothing_attached(first: str, lines: pytest.LogCaptureFixture) -> None:
    streamed, decoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Decoder(4, 4)
    maps = [(streamed, {"0": 0, "1": "cpu"}), (decoder, {"": 1})]
    for model, device_map in reversed(maps) if first == "whole" else maps:
        dispatch_model(model, device_map)
    (line,) = lines.messages
    assert line.startswith(f"Decoder lies whole on {at(1)}")
    assert line.endswith("dispatch Decoder with force_hooks=True")
    found = dispatched(decoder)
    assert found is not None
    assert found.attachments == {}  # a line, and nothing that a forward pays for


def test_models_that_all_bring_their_inputs_say_nothing(lines: pytest.LogCaptureFixture) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    dispatch_model(models[0], {"0": 0, "1": "cpu"})
    dispatch_model(models[1], {"0": 1, "1": "cpu"})
    assert not lines.messages


def test_models_on_one_accelerator_and_on_the_host_say_nothing(lines: pytest.LogCaptureFixture) -> None:
    models = [dispatch_model(Denoiser(4, 4), {"": device}) for device in (0, 0, "cpu")]
    assert not lines.messages
    del models


def test_models_that_are_gone_or_undispatched_are_not_named(lines: pytest.LogCaptureFixture) -> None:
    denoiser = dispatch_model(Denoiser(4, 4), {"": 0})
    undispatch(denoiser)
    dispatch_model(Denoiser(4, 4), {"": 0})
    gc.collect()
    dispatch_model(Decoder(4, 4), {"": 1})
    assert not lines.messages

"""Which modules bring their inputs, and where what they return goes."""

from __future__ import annotations

import pytest
import torch

from bigmodel.dispatch import dispatch_model, get_plan
from bigmodel.dispatch.attach.dispatched import Dispatched, dispatched

from ...accelerators import at, exact, two
from ..models import ids, llama, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")


def carried(model: torch.nn.Module, device_map: dict[str, object] | str, **options: object) -> Dispatched:
    found = dispatched(dispatch_model(model, device_map, **options))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_on_one_device_nothing_is_brought_unless_it_is_asked_for() -> None:
    assert carried(stack(), {"": 0}).attachments == {}
    assert set(carried(stack(), {"": 0}, force_hooks=True).attachments) == {""}


@pytest.mark.slow
@exact
def test_a_model_that_the_plan_leaves_to_the_host_brings_its_inputs_there() -> None:
    x = torch.arange(4)
    expected = stack()(x)
    model = dispatch_model(stack(), "auto", max_memory={0: 100, "cpu": "1GB"}, sample_inputs=x)
    assert get_plan(model).main_device == "cpu"
    found = model(x.to(at(0)))
    assert str(found.device) == at(0)
    assert torch.equal(found.cpu(), expected)
    for away in ({"device_map": {"": "cpu"}}, {"device_map": "auto", "max_memory": {"cpu": "1GB"}}):
        assert carried(stack(), **away).attachments == {}  # the caller has left it to the host


@two
def test_the_model_brings_its_inputs_and_returns_where_they_came_from() -> None:
    found = carried(stack(), {"": 0, "blocks.1": 1})
    root = found.attachments[""]
    assert (str(root.device), root.returns_to_input) == (at(0), True)


@two
def test_each_piece_brings_its_inputs_to_where_it_runs() -> None:
    found = carried(stack(), {"": 0, "blocks.1": 1, "blocks.2": "cpu"})
    assert str(found.attachments["blocks.1"].device) == at(1)
    assert str(found.attachments["blocks.2"].device) == at(0)


@two
def test_outputs_come_back_to_a_module_that_computes_with_them() -> None:
    attachment = carried(stack(), {"": 0, "blocks.1": 1}).attachments["blocks.1"]
    assert str(attachment.output_device) == at(0)


@two
def test_outputs_go_on_by_themselves_where_the_model_says_that_it_may_be_split() -> None:
    attachment = carried(llama(), {"": 0, "model.layers.1": 1}).attachments["model.layers.1"]
    assert attachment.output_device is None


@two
def test_what_is_added_to_embeddings_of_positions_comes_to_the_main_device_as_they_do() -> None:
    from transformers import WhisperConfig, WhisperForAudioClassification

    config = WhisperConfig(
        d_model=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8, max_source_positions=4,
        num_mel_bins=4, classifier_proj_size=4,
    )  # fmt: skip
    model = WhisperForAudioClassification(config).eval()
    features = torch.randn(1, 4, 8)
    with torch.no_grad():
        expected = model(features).logits
        found = carried(model, {"": 1, "encoder.conv1": 0})
        torch.testing.assert_close(model(features).logits.cpu(), expected)
    returned = {name for name, each in found.attachments.items() if str(each.output_device) == at(0)}
    assert returned == {"encoder.conv1", "encoder.conv2", "encoder.embed_positions"}


def test_a_part_around_streamed_blocks_may_be_called_by_itself() -> None:
    model = llama()
    found = carried(model, {"": "cpu"}, main_device=0)
    assert str(found.attachments["model"].device) == at(0)
    with torch.no_grad():
        hidden = model.model(torch.arange(4).view(1, 4)).last_hidden_state
    assert torch.isfinite(hidden.cpu()).all()


@two
def test_skip_keys_are_known_to_every_attached_module() -> None:
    found = carried(stack(), {"": 0, "blocks.1": 1}, skip_keys="fail_at")
    assert all(attachment.skip_keys == {"fail_at"} for attachment in found.attachments.values())
    assert ids().device.type == "cpu"

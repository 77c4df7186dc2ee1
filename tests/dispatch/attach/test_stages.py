"""The modules of a model whose parts are resident on several accelerators know their stages."""

from __future__ import annotations

import pytest
import torch

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import dispatched
from tests.server.tiny import tiny_model

pytestmark = [pytest.mark.virtual_only("several accelerators"), pytest.mark.usefixtures("accelerators")]

PLACES = {
    "model.embed_tokens": "virtual:0",
    "model.rotary_emb": "virtual:0",
    "model.layers.0": "virtual:0",
    "model.layers.1": "virtual:1",
    "model.norm": "virtual:1",
    "lm_head": "virtual:0",
}


def test_each_run_of_parts_on_one_device_is_a_stage() -> None:
    found = dispatched(dispatch_model(tiny_model(), PLACES))
    assert found is not None
    assert found.stages is not None
    stages: dict[int | None, set[str]] = {}
    for name, forward in found.attachments.items():
        if name in PLACES:
            stages.setdefault(forward.stage, set()).add(name)
    assert None not in stages
    # What has no weights is called at any time.
    assert set(map(frozenset, stages.values())) == {
        frozenset({"model.embed_tokens", "model.layers.0"}),
        frozenset({"model.rotary_emb"}),
        frozenset({"model.layers.1", "model.norm"}),
        frozenset({"lm_head"}),
    }
    for stage, names in stages.items():
        assert {torch.device(PLACES[name]) for name in names} == {found.stages.devices[stage or 0]}


@pytest.mark.parametrize(
    "elsewhere", [{"model.layers.1": "cpu"}, {"model.layers.1": "virtual:0", "model.norm": "virtual:0"}]
)
def test_models_that_are_streamed_or_on_one_accelerator_have_none(elsewhere: dict[str, str]) -> None:
    found = dispatched(dispatch_model(tiny_model(), {**PLACES, **elsewhere}, main_device="virtual:0"))
    assert found is None or found.stages is None


def test_the_model_computes_as_before() -> None:
    ids = torch.arange(6, device="virtual:0")[None]
    with torch.no_grad():
        expected = tiny_model().to("virtual:0")(ids, use_cache=False).logits
        found = dispatch_model(tiny_model(), PLACES)(ids, use_cache=False).logits
    assert torch.equal(found.cpu(), expected.cpu())

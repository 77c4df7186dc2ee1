"""Memory of encoder-decoder generation: the prediction against the peak measured on the virtual accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.devices import memory_allocated
from bigmodel.dispatch import dispatch_model
from bigmodel.profile import profile_model
from bigmodel.profile.trace.ledger import replay
from bigmodel.profile.trace.trace import Trace

from ...examples import alike
from .test_generation import DEVICE, peak_of_generating

pytestmark = pytest.mark.usefixtures("accelerators")


def bart() -> Any:
    import transformers as t

    sizes: dict[str, Any] = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    config = t.BartConfig(d_model=64, vocab_size=160, forced_eos_token_id=None, **sizes)
    return t.BartForConditionalGeneration(config).eval()


@pytest.mark.slow
@alike(("batch_size", "source", "new_tokens"), [(2, 60, 4), (1, 39, 1)], first=1)
def test_the_peak_of_an_encoder_decoder_is_predicted_to_the_byte(batch_size: int, source: int, new_tokens: int) -> None:
    model = bart()
    profile = profile_model(
        model,
        batch_size=batch_size,
        context_length=source + new_tokens,
        new_tokens=new_tokens,
        device_type="virtual",
    )
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    # An encoder-decoder is fed the token it starts with, so one new token less than a decoder.
    assert peak_of_generating(model.to(DEVICE), batch_size, source, new_tokens - 1) == predicted


@pytest.mark.slow
def test_an_encoders_output_that_was_moved_to_the_main_device_is_there_in_later_steps() -> None:
    """Every block of the decoder reads it, on whatever device, so it is moved to the main one."""
    import transformers as t

    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 160}
    model = t.T5ForConditionalGeneration(t.T5Config(**sizes, decoder_start_token_id=0)).eval()
    profile = profile_model(model, batch_size=2, context_length=40, new_tokens=2, device_type="virtual")
    last = next(index for index, unit in enumerate(profile.units) if unit.name == "encoder.final_layer_norm")
    assert last in profile.returning
    decode = Trace((), profile.phases[-1].trace.initial)
    there = replay(decode, {}, 0).now[0]
    assert replay(decode, {last: 1}, 0).now == {0: there}


@pytest.mark.slow
def test_the_encoders_output_goes_to_an_embedding_on_the_host_and_back_in_each_step() -> None:
    """`generate` keeps it, and brings it to the device of the model's first weights."""
    model = bart()
    profile = profile_model(model, batch_size=2, context_length=40, new_tokens=2, device_type="virtual")
    runs: dict[int, Any] = dict.fromkeys(range(len(profile.units)), 0) | {profile.first: "cpu"}
    predicted = profile.dynamic_peaks(runs, 0, input_device="cpu")[0]
    before = memory_allocated(DEVICE)
    dispatch_model(model, {unit.name: runs[index] for index, unit in enumerate(profile.units)}, main_device=0)
    there = memory_allocated(DEVICE) - before
    assert peak_of_generating(model, 2, 38, 1) - before == there + predicted

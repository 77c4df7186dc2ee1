"""Memory of encoder-decoder generation: the prediction against the peak measured on the virtual accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.profile import profile_model

from .test_generation import DEVICE, peak_of_generating

pytestmark = pytest.mark.usefixtures("accelerators")


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "source", "new_tokens"), [(1, 39, 1), (2, 60, 4)])
def test_the_peak_of_an_encoder_decoder_is_predicted_to_the_byte(batch_size: int, source: int, new_tokens: int) -> None:
    import transformers as t

    sizes: dict[str, Any] = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    model = t.BartForConditionalGeneration(t.BartConfig(d_model=64, vocab_size=160, forced_eos_token_id=None, **sizes))
    profile = profile_model(
        model.eval(),
        batch_size=batch_size,
        context_length=source + new_tokens,
        new_tokens=new_tokens,
        device_type="virtual",
    )
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    # An encoder-decoder is fed the token it starts with, so one new token less than a decoder.
    assert peak_of_generating(model.to(DEVICE), batch_size, source, new_tokens - 1) == predicted

"""Log-probabilities in the two shapes that clients read."""

from __future__ import annotations

import json
import math

from server.answers.logprobs import LOWEST, chat_logprobs, completion_logprobs
from server.engine import TokenLogprob
from server.text.codec import TextCodec
from tests.server.tiny import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())
THE, CAT = CODEC.encode("the")[0], CODEC.encode("c")[0]


def test_chat_names_each_token_with_its_bytes_and_alternatives() -> None:
    shown = chat_logprobs((TokenLogprob(THE, -0.5, ((CAT, -0.25),)),), CODEC)
    assert shown["content"] == [
        {
            "token": "the",
            "logprob": -0.5,
            "bytes": list(b"the"),
            "top_logprobs": [{"token": "c", "logprob": -0.25, "bytes": [99]}],
        }
    ]


def test_completions_say_where_in_the_text_each_token_begins() -> None:
    shown, offset = completion_logprobs((None, TokenLogprob(CAT, -1.0, ((THE, -0.5),))), (THE, CAT), CODEC, 10)
    assert shown == {
        "tokens": ["the", "c"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"the": -0.5}],
        "text_offset": [10, 13],
    }
    assert offset == 14


def test_what_cannot_happen_is_a_number_that_json_has() -> None:
    never = TokenLogprob(THE, -math.inf, ((CAT, -math.inf),))
    for shown in (chat_logprobs((never,), CODEC), completion_logprobs((never,), (THE,), CODEC, 0)[0]):
        assert json.dumps(shown, allow_nan=False).count(str(LOWEST)) == 2

"""Log-probabilities in the two shapes that clients read."""

from __future__ import annotations

import json
import math

from bigmodel.server.answers.logprobs import LOWEST, TextOffsets, chat_logprobs, completion_logprobs
from bigmodel.server.engine import TokenLogprob
from bigmodel.server.text.codec import TextCodec
from tests.server.answers.reading import CODEC
from tests.server.tiny import spaced_tokenizer

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


def test_completions_give_the_text_offset_of_each_token() -> None:
    offsets = TextOffsets(CODEC)
    assert offsets.following([THE] * 3) == [0, 3, 6]
    shown = completion_logprobs((None, TokenLogprob(CAT, -1.0, ((THE, -0.5),))), (THE, CAT), CODEC, offsets)
    assert shown == {
        "tokens": ["the", "c"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"the": -0.5}],
        "text_offset": [9, 12],
    }


def test_of_alternatives_with_one_text_the_likeliest_is_shown() -> None:
    first, second = CODEC.encode("€")[:2]  # neither is a character
    entry = TokenLogprob(first, -0.5, ((first, -0.5), (THE, -1.0), (second, -2.0)))
    shown = completion_logprobs((entry,), (first,), CODEC, TextOffsets(CODEC))
    assert shown["top_logprobs"] == [{"\ufffd": -0.5, "the": -1.0}]


def test_tokens_without_text_have_no_width_in_text_offsets() -> None:
    end = CODEC.tokenizer.eos_token_id
    euro = CODEC.encode("€")
    assert TextOffsets(CODEC).following([end, THE, *euro, CAT]) == [0, 0, 3, 3, 3, 4]


def test_text_offsets_count_a_leading_space_only_in_continued_texts() -> None:
    spaced = TextCodec(spaced_tokenizer())
    the, cat = spaced.tokenizer.convert_tokens_to_ids(["\u2581the", "\u2581cat"])
    assert TextOffsets(spaced).following([the, cat]) == [0, len("the")]
    assert TextOffsets(spaced, [the]).following([cat, cat]) == [0, len(" cat")]


def test_impossible_tokens_have_a_finite_logprob() -> None:
    never = TokenLogprob(THE, -math.inf, ((CAT, -math.inf),))
    for shown in (chat_logprobs((never,), CODEC), completion_logprobs((never,), (THE,), CODEC, TextOffsets(CODEC))):
        assert json.dumps(shown, allow_nan=False).count(str(LOWEST)) == 2

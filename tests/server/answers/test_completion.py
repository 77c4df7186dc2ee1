"""A completion, in chunks and whole, says the same, the echoed prompt included."""

from __future__ import annotations

import pytest

from bigmodel.server.answers.completion import CompletionAnswer
from bigmodel.server.engine import Delta, Done, TokenLogprob
from tests.server.answers.reading import CODEC, read

DONE = Done(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
PROMPTS = [CODEC.encode("the"), CODEC.encode("cat")]


def answer(n: int = 1, **options: bool) -> CompletionAnswer:
    given = {"echo": False, "logprobs": False, "usage": False, **options}
    return CompletionAnswer("cmpl-1", 7, "tiny", PROMPTS, n, CODEC, **given)


def test_a_chunk_carries_text_and_reason() -> None:
    (chunk,) = read(answer().chunk(1, Delta(1, 'a "b"\n', finish_reason="stop")))
    assert (chunk["object"], chunk["id"], chunk["model"], chunk["created"]) == ("text_completion", "cmpl-1", "tiny", 7)
    assert chunk["choices"] == [{"index": 1, "text": 'a "b"\n', "logprobs": None, "finish_reason": "stop"}]
    assert "usage" not in chunk


def test_nothing_opens_a_stream_and_usage_ends_it_where_it_was_asked_for() -> None:
    assert (answer().opening(), answer().closing(DONE)) == (b"", b"")
    (last,) = read(answer(usage=True).closing(DONE))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_the_choices_of_a_prompt_stand_together_and_echo_it_once() -> None:
    made = answer(n=2, echo=True)
    for index in range(4):
        made.add(index, Delta(index, "+"))
        made.add(index, Delta(index, "-", finish_reason="length"))
    assert [choice["text"] for choice in made.whole(DONE)["choices"]] == ["the+-", "the+-", "cat+-", "cat+-"]


@pytest.mark.parametrize("echo", [False, True])
def test_the_whole_answer_is_what_the_chunks_say(echo: bool) -> None:
    a, b, c = CODEC.encode("abc")
    of_prompt = (None, *(TokenLogprob(token, -1.0) for token in PROMPTS[0][1:]))
    deltas = [
        Delta(0, "a", (a,), (TokenLogprob(a, -0.5),), of_prompt),
        Delta(0, "bc", (b, c), (TokenLogprob(b, -2.0), TokenLogprob(c, -3.0)), finish_reason="stop"),
    ]
    whole, streamed = answer(echo=echo, logprobs=True), answer(echo=echo, logprobs=True)
    chunks = []
    for delta in deltas:
        whole.add(0, delta)
        chunks += [chunk["choices"][0] for chunk in read(streamed.chunk(0, delta))]
    choice = whole.whole(DONE)["choices"][0]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"] == ("theabc" if echo else "abc")
    for key, value in choice["logprobs"].items():
        assert [part for chunk in chunks for part in chunk["logprobs"][key]] == value

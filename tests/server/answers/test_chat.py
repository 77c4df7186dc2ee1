"""A chat answer, in chunks and whole, says the same."""

from __future__ import annotations

from bigmodel.server.answers.chat import ChatAnswer
from bigmodel.server.engine import Delta, Done, TokenLogprob
from tests.server.answers.reading import CODEC, read

DONE = Done(prompt_tokens=3, completion_tokens=2, cached_tokens=1)


def answer(n: int = 1, **options: bool) -> ChatAnswer:
    return ChatAnswer("chatcmpl-1", 7, "tiny", n, CODEC, **{"logprobs": False, "usage": False, **options})


def test_a_stream_opens_with_the_role_of_each_choice() -> None:
    chunks = read(answer(n=2).opening())
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == "chatcmpl-1" for chunk in chunks)


def test_the_reason_to_end_comes_in_a_chunk_of_its_own() -> None:
    text, end = read(answer().chunk(0, Delta(0, 'a "quoted" ö', finish_reason="stop")))
    assert text["choices"] == [
        {"index": 0, "delta": {"content": 'a "quoted" ö'}, "logprobs": None, "finish_reason": None}
    ]
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_usage_ends_the_stream_where_it_was_asked_for() -> None:
    assert answer().closing(DONE) == b""
    asked = answer(usage=True)
    (last,) = read(asked.closing(DONE))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None for chunk in read(asked.opening()))


def test_the_whole_answer_is_what_the_chunks_say() -> None:
    deltas = [
        Delta(0, "th", logprobs=(TokenLogprob(1, -0.5, ((2, -0.1),)),)),
        Delta(1, "x", finish_reason="stop", logprobs=(TokenLogprob(3, -2.0),)),
        Delta(0, "e", finish_reason="length", logprobs=(TokenLogprob(4, -1.0),)),
    ]
    whole, streamed = answer(n=2, logprobs=True), answer(n=2, logprobs=True)
    chunks = []
    for delta in deltas:
        whole.add(delta.index, delta)
        chunks += read(streamed.chunk(delta.index, delta))
    result = whole.whole(DONE)
    assert result["object"] == "chat.completion"
    for choice in result["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["delta"].get("content", "") for each in own) == choice["message"]["content"]
        assert [part for each in own if each["logprobs"] for part in each["logprobs"]["content"]] == choice["logprobs"][
            "content"
        ]
        assert own[-1]["finish_reason"] == choice["finish_reason"]

"""Completions and chat answers say the same in chunks and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bigmodel.server.answers.openai import ChatAnswer, CompletionAnswer
from bigmodel.server.engine import Delta, Done, TokenLogprob
from tests.server.answers.parsers.reading import form
from tests.server.answers.reading import CODEC, read

END = b"data: [DONE]\n\n"
DONE = Done(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
PROMPTS = [CODEC.encode("the"), CODEC.encode("cat")]


def completion(n: int = 1, **options: bool) -> CompletionAnswer:
    given = {"echo": False, "logprobs": False, "usage": False, **options}
    return CompletionAnswer("cmpl-1", 7, "tiny", PROMPTS, n, CODEC, **given)


def test_a_completion_chunk_has_text_and_finish_reason() -> None:
    (chunk,) = read(completion().chunk(1, Delta(1, 'a "b"\n', finish_reason="stop")))
    assert (chunk["object"], chunk["id"], chunk["model"], chunk["created"]) == ("text_completion", "cmpl-1", "tiny", 7)
    assert chunk["choices"] == [{"index": 1, "text": 'a "b"\n', "logprobs": None, "finish_reason": "stop"}]
    assert "usage" not in chunk


def test_a_completion_stream_opens_with_nothing_and_ends_with_usage_if_requested() -> None:
    assert (completion().opening(), completion().closing(DONE)) == (b"", END)
    requested = completion(usage=True)
    (chunk,) = read(requested.chunk(0, Delta(0, "a")))
    assert chunk["usage"] is None
    (last,) = read(requested.closing(DONE))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_choices_of_a_prompt_are_consecutive_and_each_echoes_it_once() -> None:
    made = completion(n=2, echo=True)
    for index in range(4):
        made.add(index, Delta(index, "+"))
        made.add(index, Delta(index, "-", finish_reason="length"))
    assert [choice["text"] for choice in json.loads(made.whole(DONE))["choices"]] == [
        "the+-",
        "the+-",
        "cat+-",
        "cat+-",
    ]


@pytest.mark.parametrize("echo", [False, True])
def test_a_whole_completion_equals_its_chunks(echo: bool) -> None:
    a, b, c = CODEC.encode("abc")
    of_prompt = (None, *(TokenLogprob(token, -1.0) for token in PROMPTS[0][1:]))
    deltas = [
        Delta(0, "a", (a,), (TokenLogprob(a, -0.5),), of_prompt),
        Delta(0, "bc", (b, c), (TokenLogprob(b, -2.0), TokenLogprob(c, -3.0)), finish_reason="stop"),
    ]
    whole, streamed = completion(echo=echo, logprobs=True), completion(echo=echo, logprobs=True)
    chunks = []
    for delta in deltas:
        whole.add(0, delta)
        chunks += [chunk["choices"][0] for chunk in read(streamed.chunk(0, delta))]
    choice = json.loads(whole.whole(DONE))["choices"][0]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"] == ("theabc" if echo else "abc")
    for key, value in choice["logprobs"].items():
        assert [part for chunk in chunks for part in chunk["logprobs"][key]] == value


def chat(n: int = 1, **options: Any) -> ChatAnswer:
    return ChatAnswer("chatcmpl-1", 7, "tiny", n, CODEC, **{"logprobs": False, "usage": False, **options})


def test_a_chat_stream_opens_with_the_role_of_each_choice() -> None:
    chunks = read(chat(n=2).opening())
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == "chatcmpl-1" for chunk in chunks)


def test_the_finish_reason_is_a_separate_chat_chunk() -> None:
    text, end = read(chat().chunk(0, Delta(0, 'a "quoted" ö', finish_reason="stop")))
    assert text["choices"] == [
        {"index": 0, "delta": {"content": 'a "quoted" ö'}, "logprobs": None, "finish_reason": None}
    ]
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_a_chat_stream_ends_with_usage_if_requested() -> None:
    assert chat().closing(DONE) == END
    asked = chat(usage=True)
    (last,) = read(asked.closing(DONE))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None for chunk in read(asked.opening()))


def test_a_whole_chat_answer_equals_its_chunks() -> None:
    deltas = [
        Delta(0, "th", logprobs=(TokenLogprob(1, -0.5, ((2, -0.1),)),)),
        Delta(1, "x", finish_reason="stop", logprobs=(TokenLogprob(3, -2.0),)),
        Delta(0, "e", finish_reason="length", logprobs=(TokenLogprob(4, -1.0),)),
    ]
    whole, streamed = chat(n=2, logprobs=True), chat(n=2, logprobs=True)
    chunks = []
    for delta in deltas:
        whole.add(delta.index, delta)
        chunks += read(streamed.chunk(delta.index, delta))
    result = json.loads(whole.whole(DONE))
    assert result["object"] == "chat.completion"
    for choice in result["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["delta"].get("content", "") for each in own) == choice["message"]["content"]
        assert [part for each in own if each["logprobs"] for part in each["logprobs"]["content"]] == choice["logprobs"][
            "content"
        ]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_calls_and_reasoning_are_the_same_in_chunks_and_whole() -> None:
    text = '<think>Hm.</think>Look:<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    deltas = [Delta(0, text[:40]), Delta(0, text[40:]), Delta(0, "", finish_reason="stop")]
    parsed = form("hermes", "think")
    whole = ChatAnswer("1", 7, "tiny", 1, CODEC, logprobs=False, usage=False, answer_format=parsed)
    streamed = ChatAnswer("1", 7, "tiny", 1, CODEC, logprobs=False, usage=False, answer_format=parsed)
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        whole.add(0, delta)
        for chunk in read(streamed.chunk(0, delta)):
            for name, value in chunk["choices"][0]["delta"].items():
                found[name] += value
    (choice,) = json.loads(whole.whole(DONE))["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], chunk["choices"][0]["finish_reason"]) == ("tool_calls", "tool_calls")
    assert (found["content"], found["reasoning_content"]) == (message["content"], message["reasoning_content"])
    for one in found["tool_calls"] + message["tool_calls"]:
        assert one["function"] == {"name": "get_time", "arguments": "{}"}
        assert one["id"].startswith("call_")
    assert [one["index"] for one in found["tool_calls"]] == [0]


def test_an_answer_that_is_nothing_but_calls_has_no_content() -> None:
    made = ChatAnswer("1", 7, "tiny", 1, CODEC, logprobs=False, usage=False, answer_format=form("hermes"))
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    made.add(0, Delta(0, call, finish_reason="length"))
    (choice,) = json.loads(made.whole(DONE))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


def test_chunks_have_the_usage_of_their_choice_up_to_them_where_that_is_asked_for() -> None:
    text = completion(usage=True, continuous_usage=True)
    talk = chat(n=2, usage=True, continuous_usage=True, prompt_tokens=3)
    prompts = len(PROMPTS[0]), 3
    for answer, prompt in zip((text, talk), prompts):
        chunks = read(answer.opening())
        for index in range(2):
            chunks += read(answer.chunk(index, Delta(index, "a", (1,))))
            chunks += read(answer.chunk(index, Delta(index, "bc", (2, 3), finish_reason="stop")))
        for chunk in chunks:
            written = "abc"[: chunk["usage"]["completion_tokens"]]
            (choice,) = chunk["choices"]
            said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            assert written.endswith(said)
            length = prompt if answer is talk or not choice["index"] else len(PROMPTS[1])
            assert chunk["usage"]["prompt_tokens"] == length
            assert chunk["usage"]["total_tokens"] == length + len(written)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop") == 2
        assert chunks[-1]["usage"]["completion_tokens"] == 3

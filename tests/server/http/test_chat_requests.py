"""POST /v1/chat/completions: from a conversation to the tokens of its prompt, and what the route decides."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.chat_requests import chat_inputs
from bigmodel.server.http.errors import APIError
from bigmodel.server.text.codec import TextCodec, _TimeLimits
from tests.server.http.asking import CHAT, post, refusal
from tests.server.tiny import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens_are_accepted(url: str, name: str) -> None:
    answer = post(url, CHAT, **{name: 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["id"].startswith("chatcmpl-")


def test_each_choice_is_a_separate_message(url: str) -> None:
    choices = post(url, CHAT, n=2, max_tokens=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["message"]["role"] for choice in choices} == {"assistant"}


def test_logprobs_are_returned_only_on_request(url: str) -> None:
    asked, plain = (
        post(url, CHAT, max_tokens=2, **more).json()["choices"][0]["logprobs"]
        for more in ({"logprobs": True, "top_logprobs": 2}, {})
    )
    assert plain is None
    assert [len(token["top_logprobs"]) for token in asked["content"]] == [2, 2]


def test_a_conversation_longer_than_the_context_is_refused(url: str) -> None:
    long = [{"role": "user", "content": "a" * 2000}]
    assert refusal(url, CHAT, messages=long) == (400, "messages")


def test_a_template_that_does_not_end_is_an_error_of_its_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.server.text.codec._templates", _TimeLimits())
    monkeypatch.setattr("bigmodel.server.text.codec.TEMPLATE_SECONDS", 0.05)
    endless = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + 3 * "{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(tiny_tokenizer(), "chat_template", endless)
        error = post(url, CHAT, max_tokens=2).json()["error"]
    assert (error["code"], error["param"]) == ("template_too_slow", "messages")
    assert "did not end within 0.05 seconds" in error["message"]
    assert post(url, CHAT, max_tokens=2).status_code == 200


@pytest.mark.anyio
async def test_a_conversation_goes_through_the_template_with_its_tools() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    shown = [
        (await chat_inputs(ChatBody.model_validate({**body, **more}), CODEC, 9000))[0]
        for more in ({}, {"tool_choice": "none"})
    ]
    assert [CODEC.decode(tokens) for tokens in shown] == [
        "[tools: 1]\n<user>hi\n<assistant>",
        "<user>hi\n<assistant>",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ m.tool_calls[0].function.arguments.a }}", "1"),
        ("{{ m.tool_calls[0].function.arguments | tojson }}", '{"a": 1}'),
        ("{{ '<' + m.tool_calls[0].function.arguments }}", '<{"a":  1}'),
    ],
)
async def test_templates_take_arguments_as_objects_or_as_text(
    template: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", "{% for m in messages %}" + template + "{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert CODEC.decode((await chat_inputs(ChatBody.model_validate(body), CODEC, 9000))[0]) == text


@pytest.mark.anyio
async def test_arguments_of_earlier_calls_are_bounded() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 60_000}}
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(APIError, match="too many values") as refused:
        (await chat_inputs(ChatBody.model_validate(body), CODEC, 9000))[0]
    assert (refused.value.status, refused.value.param) == (413, "messages")


def chat(**variables: Any) -> ChatBody:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return ChatBody.model_validate({"model": "tiny", "messages": messages, "chat_template_kwargs": variables})


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "self", "return_dict"])
async def test_template_variables_of_the_server_are_refused(name: str) -> None:
    with pytest.raises(APIError, match=f"'{name}' is no variable") as refused:
        (await chat_inputs(chat(**{name: 1}), CODEC, 9000))[0]
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


@pytest.mark.anyio
async def test_a_last_message_may_be_continued() -> None:
    body = chat(continue_final_message=True).model_copy(update={"add_generation_prompt": False})
    assert CODEC.decode((await chat_inputs(body, CODEC, 9000))[0]) == "<user>a\n<assistant>b"


@pytest.mark.anyio
@pytest.mark.parametrize("knows", [False, True])
async def test_developers_are_the_system_for_templates_that_do_not_know_them(
    monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% endfor %}" + "{# developer #}" * knows
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", template)
    body = ChatBody.model_validate({"model": "tiny", "messages": [{"role": "developer", "content": "a"}]})
    assert CODEC.decode((await chat_inputs(body, CODEC, 100))[0]) == ("<developer>" if knows else "<system>")

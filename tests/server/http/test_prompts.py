"""From what a client sent to the tokens of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.prompts import chat_prompt, completion_prompts
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())
TOOL = {"type": "function", "function": {"name": "f"}}


def completion(prompt: Any = "x", **fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "tiny", "prompt": prompt, **fields})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("the", [CODEC.encode("the")]),
        (["the", "cat"], [CODEC.encode("the"), CODEC.encode("cat")]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("cat " * 2000, [CODEC.encode("cat " * 2000)]),  # long enough to be read in another thread
    ],
)
async def test_prompts_in_each_of_their_shapes(prompt: Any, tokens: list[list[int]]) -> None:
    assert await completion_prompts(completion(prompt), CODEC, 9000) == tokens


@pytest.mark.anyio
async def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(APIError, match="not in the vocabulary"):
        await completion_prompts(completion([CODEC.vocabulary_size]), CODEC, 9000)


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", ["cat " * 20_000, [1] * 80])
async def test_a_prompt_beyond_the_context_is_refused_without_tokenising_all_of_it(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = CODEC.tokenizer.encode
    monkeypatch.setattr(
        CODEC.tokenizer, "encode", lambda text, **more: lengths.append(len(text)) or encode(text, **more)
    )
    with pytest.raises(APIError, match="at most 40 fit") as refused:
        await completion_prompts(completion(prompt), CODEC, 40)
    assert (refused.value.status, refused.value.param) == (413, "prompt")
    assert sum(lengths) < 1000


@pytest.mark.anyio
async def test_a_conversation_goes_through_the_template_with_its_tools() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    shown = [
        await chat_prompt(ChatBody.model_validate({**body, **more}), CODEC, 9000)
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
    assert CODEC.decode(await chat_prompt(ChatBody.model_validate(body), CODEC, 9000)) == text


@pytest.mark.anyio
async def test_arguments_of_earlier_calls_are_bounded() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 60_000}}
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(APIError, match="too many values") as refused:
        await chat_prompt(ChatBody.model_validate(body), CODEC, 9000)
    assert (refused.value.status, refused.value.param) == (413, "messages")


def chat(**variables: Any) -> ChatBody:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return ChatBody.model_validate({"model": "tiny", "messages": messages, "chat_template_kwargs": variables})


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "self", "return_dict"])
async def test_template_variables_of_the_server_are_refused(name: str) -> None:
    with pytest.raises(APIError, match=f"'{name}' is no variable") as refused:
        await chat_prompt(chat(**{name: 1}), CODEC, 9000)
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


@pytest.mark.anyio
async def test_a_last_message_may_be_continued() -> None:
    body = chat(continue_final_message=True).model_copy(update={"add_generation_prompt": False})
    assert CODEC.decode(await chat_prompt(body, CODEC, 9000)) == "<user>a\n<assistant>b"


@pytest.mark.anyio
@pytest.mark.parametrize("knows", [False, True])
async def test_developers_are_the_system_for_templates_that_do_not_know_them(
    monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% endfor %}" + "{# developer #}" * knows
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", template)
    body = ChatBody.model_validate({"model": "tiny", "messages": [{"role": "developer", "content": "a"}]})
    assert CODEC.decode(await chat_prompt(body, CODEC, 100)) == ("<developer>" if knows else "<system>")

"""What a chat template is shown of Anthropic's messages."""

from __future__ import annotations

from typing import Any

from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.messages_bodies import MessagesBody
from bigmodel.server.http.messages_chats import chat_fields, thinking_wanted


def chat(**fields: Any) -> ChatBody:
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return ChatBody.model_validate(chat_fields(MessagesBody.model_validate(asked)))


def shown(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.plain() for message in chat(messages=list(messages), **fields).messages]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_the_system_prompt_comes_first_and_blocks_are_joined() -> None:
    assert shown({"role": "user", "content": [text("a"), text("b")]}, system=[text("c"), text("d")]) == [
        {"role": "system", "content": "c\n\nd"},
        {"role": "user", "content": "a\n\nb"},
    ]


def test_calls_and_their_results_are_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "rain"},
        {"type": "tool_result", "tool_use_id": "2", "content": [text("x"), text("y")], "is_error": True},
        text("and?"),
    ]
    thought = {"type": "thinking", "thinking": "why", "signature": ""}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [thought, text("I look."), call]},
        {"role": "user", "content": results},
    ]
    assert shown(*messages)[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "why",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: x\n\ny", "tool_call_id": "2"},
        {"role": "user", "content": "and?"},
    ]


def test_an_answer_that_was_begun_is_continued_unless_it_calls() -> None:
    begun = {"role": "assistant", "content": "so"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    hi = {"role": "user", "content": "hi"}
    assert [chat(messages=each).continue_final_message for each in ([hi, begun], [hi, call], [hi])] == [
        True,
        False,
        False,
    ]


def test_fields_of_the_same_meaning() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    made = chat(
        tools=[tool],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        stop_sequences=["a"],
        top_k=3,
        temperature=0.5,
        thinking={"type": "enabled", "budget_tokens": 4},
    )
    assert list(made.functions) == ["f"]
    assert made.functions["f"].strict
    assert (made.call_required, made.parallel_tool_calls) == (True, False)
    assert (made.stops, made.top_k, made.temperature, made.max_tokens) == (("a",), 3, 0.5, 9)
    assert made.thinking_token_budget == 4
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    made = chat(output_config={"format": schema, "effort": "low"}, tool_choice={"type": "auto"})
    assert made.response_format is not None
    assert made.response_format.json_schema is not None
    assert (made.response_format.json_schema.schema_, made.reasoning_effort) == ({"type": "object"}, "low")


def test_whether_to_reason() -> None:
    wanted = []
    for kind in ({"type": "enabled", "budget_tokens": 1}, {"type": "disabled"}, {"type": "adaptive"}):
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "thinking": kind}
        wanted.append(thinking_wanted(MessagesBody.model_validate(asked)))
    assert wanted == [True, False, None]

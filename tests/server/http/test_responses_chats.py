"""What a chat template is shown of the items of a response."""

from __future__ import annotations

from typing import Any

from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.responses_bodies import ResponsesBody
from bigmodel.server.http.responses_chats import chat_fields


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate(chat_fields(ResponsesBody.model_validate({"model": "m", "input": "hi", **fields})))


def shown(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.plain() for message in chat(input=list(items), **fields).messages]


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def test_a_refusal_of_an_earlier_answer_is_its_text() -> None:
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    assert shown(refused) == [{"role": "assistant", "content": "I cannot."}]


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": str(number), "name": "f", "arguments": "{}"}


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": str(number), "output": [{"type": "input_text", "text": "ok"}]}


def plain_call(number: int) -> dict[str, Any]:
    return {"id": str(number), "type": "function", "function": {"name": "f", "arguments": {}}}


def test_a_text_is_a_message_and_instructions_come_before_it() -> None:
    assert [message.plain() for message in chat(instructions="Be brief.").messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_reasoning_text_and_calls_next_to_each_other_are_one_answer() -> None:
    assert shown(reasoning("why"), said("so"), call(1), call(2), output(1), output(2), said("done")) == [
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "why",
            "tool_calls": [plain_call(1), plain_call(2)],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
        {"role": "tool", "content": "ok", "tool_call_id": "2"},
        {"role": "assistant", "content": "done"},
    ]


def test_what_follows_a_call_or_a_text_is_another_answer() -> None:
    assert shown(said("a"), said("b"), call(1), reasoning("why"), call(2)) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [plain_call(1)]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "why",
            "tool_calls": [plain_call(2)],
            "thinking": "why",
        },
    ]


def test_a_summary_stands_for_reasoning_that_is_not_there() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}
    assert shown(item, said("so"))[0]["reasoning_content"] == "why"


def test_fields_of_the_same_meaning() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    made = chat(
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        max_output_tokens=7,
        top_logprobs=2,
        reasoning={"effort": "low"},
    )
    assert list(made.functions) == ["f"]
    assert (made.call_required, made.single_call, made.limit) == (True, True, ("max_completion_tokens", 7))
    assert (made.logprobs, made.top_logprobs, made.reasoning_effort) == (True, 2, "low")
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    made = chat(text={"format": form})
    assert made.response_format is not None
    assert made.response_format.json_schema is not None
    assert made.response_format.json_schema.schema_ == {"type": "object"}
    assert chat(text={"format": {"type": "json_object"}}).response_format is not None

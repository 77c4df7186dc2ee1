"""Anthropic's messages as chats: what a chat template shows of them, and the fields of the same meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bigmodel.server.http.messages_bodies import (
    AnthropicMessage,
    AnthropicTool,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)

FIELDS = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    "stop": "stop_sequences",
}
"""Fields of a chat, as patterns, and what they are called here."""

USUAL_EFFORT = "high"
"""The effort that is meant where none is given."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BETWEEN = "\n\n"  # blocks of text, and messages of one role next to each other


def chat_fields(body: CountTokensBody) -> dict[str, Any]:
    """Return the fields of the chat that asks for the same, as from JSON."""
    messages = list(_joined(_messages(body)))
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    last = body.messages[-1]
    if last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in last.blocks):
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.format is not None:
        schema = {"name": "answer", "schema": body.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p")}
        fields["stop"] = body.stop_sequences
    return fields


def thinking_wanted(body: CountTokensBody) -> bool | None:
    """Whether the model is to reason; None to leave that to the model."""
    return None if body.thinking is None or body.thinking.type == "adaptive" else body.thinking.type == "enabled"


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _messages(body: CountTokensBody) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for message in body.messages:
        yield from (_answer(message) if message.role == "assistant" else _question(message))


def _answer(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """An earlier answer: text, reasoning and calls in the order of chat templates."""
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.blocks if block.type == "thinking"]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.blocks
        if isinstance(block, ToolUseBlock)
    ]
    found: dict[str, Any] = {"role": "assistant", "content": _BETWEEN.join(texts)}
    if thoughts:
        found["reasoning_content"] = _BETWEEN.join(thoughts)
    if calls:
        found["tool_calls"] = calls
    yield found


def _question(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Results of calls and texts, each a message of its own; images of results follow these as the user's."""
    images: list[ImageBlock] = []
    for block in message.blocks:
        if not isinstance(block, ToolResultBlock):
            yield from (_image(message.role, image) for image in images)
            images = []
        if isinstance(block, ToolResultBlock):
            images += block.images
            text = _text(block.content or "")
            shown = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": shown}
        elif isinstance(block, TextBlock):
            yield {"role": message.role, "content": block.text}
        elif isinstance(block, ImageBlock):
            yield _image(message.role, block)
    yield from (_image(message.role, image) for image in images)


def _image(role: str, block: ImageBlock) -> dict[str, Any]:
    source = block.source
    url = source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"
    return {"role": role, "content": [{"type": "image_url", "image_url": {"url": url}}]}


def _text(content: str | Sequence[TextBlock | ImageBlock]) -> str:
    if isinstance(content, str):
        return content
    return _BETWEEN.join(block.text for block in content if isinstance(block, TextBlock))


def _joined(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Join texts of one role next to each other, which chat templates may refuse; results and calls stay apart."""
    for plain, group in groupby(
        messages, key=lambda message: message.keys() == {"role", "content"} and message["role"]
    ):
        if not plain:
            yield from group
        else:
            yield {"role": plain, "content": _joined_contents([message["content"] for message in group])}


def _joined_contents(contents: list[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """One text, or the parts of one content if there are images; texts next to each other stay apart in either."""
    parts: list[dict[str, Any]] = []
    for is_text, group in groupby(contents, key=lambda content: isinstance(content, str)):
        if is_text:
            parts.append({"type": "text", "text": _BETWEEN.join(each for each in group if isinstance(each, str))})
        else:
            parts += (part for each in group for part in each if isinstance(part, dict))
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts

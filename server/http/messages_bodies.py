"""Bodies of Anthropic's messages: the fields that its API documents, as far as a model of texts can honour them.

A field that could only be ignored is not among them, and so is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from bigmodel.server.http.bodies import (
    MAX_STOPS,
    Body,
    Cached,
    FreeObject,
    Number,
    StopString,
    Text,
    by_type,
    disagrees,
)
from bigmodel.server.http.chat_bodies import MAX_MESSAGES
from bigmodel.server.http.tool_bodies import FunctionName, few_tools

# --- blocks -------------------------------------------------------------------------------------------


class TextBlock(Cached):
    type: Literal["text"]
    text: Text
    citations: Annotated[list[None], Field(max_length=0)] | None = None


class ImageSource(Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/webp"]
    data: Text


class URLSource(Body):
    type: Literal["url"]
    url: Text


class ImageBlock(Cached):
    type: Literal["image"]
    source: Annotated[
        Annotated[ImageSource, Tag("the type base64")] | Annotated[URLSource, Tag("the type url")],
        by_type("base64", "url"),
    ]


class ThinkingBlock(Body):
    """Reasoning of an earlier answer, as this server sent it; its signature is empty."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Cached):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: FreeObject
    caller: DirectCaller | None = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("the type text")] | Annotated[ImageBlock, Tag("the type image")], by_type("text", "image")
]


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool = False

    @property
    def images(self) -> list[ImageBlock]:
        """Its images."""
        blocks = self.content if isinstance(self.content, list) else []
        return [block for block in blocks if isinstance(block, ImageBlock)]


Block = Annotated[
    Annotated[TextBlock, Tag("the type text")]
    | Annotated[ImageBlock, Tag("the type image")]
    | Annotated[ThinkingBlock, Tag("the type thinking")]
    | Annotated[ToolUseBlock, Tag("the type tool_use")]
    | Annotated[ToolResultBlock, Tag("the type tool_result")],
    by_type("text", "image", "thinking", "tool_use", "tool_result"),
]

_BLOCKS_OF = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class AnthropicMessage(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> AnthropicMessage:
        for index, block in enumerate(self.blocks):
            if block.type not in _BLOCKS_OF[self.role]:
                raise disagrees(f"content.{index}.type", f"'{block.type}' is no block of the role '{self.role}'")
        return self

    @property
    def blocks(self) -> list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


# --- tools --------------------------------------------------------------------------------------------


class AnthropicTool(Cached):
    type: Literal["custom"] = "custom"
    name: FunctionName
    description: Text | None = None
    input_schema: FreeObject
    strict: bool | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise disagrees("name", "is required with type 'tool', and only there")
        return self


# --- reasoning and form of the answer -----------------------------------------------------------------


class Thinking(Body):
    """Whether the model reasons before it answers, and what is shown of that."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget_where_enabled(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise disagrees("budget_tokens", "is required with type 'enabled', and only there")
        return self


class JsonOutput(Body):
    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


# --- the bodies ---------------------------------------------------------------------------------------


class AnthropicMetadata(Body):
    """The client's own label."""

    user_id: Text | None = None


class CountTokensBody(Cached):
    """POST /v1/messages/count_tokens."""

    model: Text
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | TextBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True), BeforeValidator(few_tools)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None

    @model_validator(mode="after")
    def _one_format(self) -> CountTokensBody:
        newer = None if self.output_config is None else self.output_config.format
        if None not in (newer, self.output_format) and newer != self.output_format:
            raise disagrees("output_format", "is not what output_config.format says; give one of them")
        return self

    @property
    def format(self) -> JsonOutput | None:
        """The form of the answer; `output_format` is the older name of it."""
        newer = None if self.output_config is None else self.output_config.format
        return newer or self.output_format


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="after")
    def _budget_fits(self) -> MessagesBody:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise disagrees("thinking.budget_tokens", "must be less than max_tokens")
        return self

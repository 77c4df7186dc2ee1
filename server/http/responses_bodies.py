"""Bodies of OpenAI's responses. Nothing is kept between requests: fields that need that are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from bigmodel.server.http.bodies import (
    MAX_TOP_LOGPROBS,
    Body,
    FreeObject,
    Labels,
    Number,
    Text,
    by_type,
    disagrees,
    string_or_type,
)
from bigmodel.server.http.chat_bodies import MAX_MESSAGES, ReasoningEffort
from bigmodel.server.http.tool_bodies import FunctionName, few_tools

Status = Literal["in_progress", "completed", "incomplete"]
NoItems = Annotated[list[None], Field(max_length=0)]

LOGPROBS = "message.output_text.logprobs"
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""Optional fields of an answer. Reasoning is always part of it in plain form."""


# --- items --------------------------------------------------------------------------------------------


class InputText(Body):
    type: Literal["input_text"]
    text: Text


class InputImage(Body):
    """An image as a data URL. How much detail is looked at is the model's own."""

    type: Literal["input_image"]
    image_url: Text
    detail: Literal["auto"] | None = None


class OutputText(Body):
    """Text of an earlier answer. Its log-probabilities are not read."""

    type: Literal["output_text"]
    text: Text
    annotations: NoItems | None = None
    logprobs: Annotated[list[FreeObject], Field(fail_fast=True)] | None = None


class OutputRefusal(Body):
    """Text by which an earlier answer refused."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The whole text."""
        return self.refusal


Part = Annotated[
    Annotated[InputText, Tag("the type input_text")]
    | Annotated[InputImage, Tag("the type input_image")]
    | Annotated[OutputText, Tag("the type output_text")]
    | Annotated[OutputRefusal, Tag("the type refusal")],
    by_type("input_text", "input_image", "output_text", "refusal"),
]


class MessageItem(Body):
    """A message. Those of earlier answers have an identifier and a status, which nothing depends on."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], Field(fail_fast=True)]
    id: Text | None = None
    status: Status | None = None
    phase: Literal["final_answer"] | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return text_of(self.content)


class CallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Status | None = None


OutputPart = Annotated[
    Annotated[InputText, Tag("the type input_text")] | Annotated[InputImage, Tag("the type input_image")],
    by_type("input_text", "input_image"),
]


class CallOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Annotated[list[OutputPart], Field(fail_fast=True)]
    id: Text | None = None
    status: Status | None = None

    @property
    def images(self) -> list[InputImage]:
        """Its images."""
        parts = self.output if isinstance(self.output, list) else []
        return [part for part in parts if isinstance(part, InputImage)]


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Body):
    type: Literal["summary_text"]
    text: Text


class ReasoningItem(Body):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None
    id: Text | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The whole text, of a summary where there is nothing else."""
        return "".join(part.text for part in self.content or self.summary or ())


def text_of(content: str | Sequence[InputText | InputImage | OutputText | OutputRefusal]) -> str:
    """The text of a content in parts."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if not isinstance(part, InputImage))


def _item_type(given: Any) -> Any:
    """The tag of an item's type; one without a type is a message."""
    kind = given.get("type") or "message" if isinstance(given, dict) else getattr(given, "type", None)
    return f"the type {kind}" if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("the type message")]
    | Annotated[CallItem, Tag("the type function_call")]
    | Annotated[CallOutputItem, Tag("the type function_call_output")]
    | Annotated[ReasoningItem, Tag("the type reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="must be an object of the type message, function_call, function_call_output or reasoning",
    ),
]


# --- tools and form of the answer ---------------------------------------------------------------------


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: Text


class AllowedFunctions(Body):
    """The functions that may be called, of all that are given."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, fail_fast=True), BeforeValidator(few_tools)]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")]
    | Annotated[NamedFunction, Tag("the type function")]
    | Annotated[AllowedFunctions, Tag("the type allowed_tools")],
    string_or_type("function", "allowed_tools"),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> TextFormat:
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if (self.type == "json_schema") != (value is not None):
                raise disagrees(field, "is required with type 'json_schema', and only there")
        return self


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """How much to reason. Reasoning is given whole, so that no other summary of it is."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


# --- the body -----------------------------------------------------------------------------------------


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: Text
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), BeforeValidator(few_tools)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool = True
    ignore_eos: bool = False
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: Annotated[list[Included], Field(max_length=8, fail_fast=True)] | None = None
    metadata: Labels | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = False
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _nothing_is_kept(self) -> ResponsesBody:
        if self.store:
            raise disagrees("store", "is not supported: no response is kept. Send false, or leave it out")
        if self.stream_options is not None and not self.stream:
            raise disagrees("stream_options", "is only allowed with stream=true")
        return self

    @property
    def logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

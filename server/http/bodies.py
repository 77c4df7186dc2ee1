"""Bodies of chats, and what all bodies are made of. Unknown fields are refused, not ignored.

Validation ends at the first item of a list that is wrong: an error for each of a million items would take minutes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bigmodel.server.answers.parsers.schema_check import unchecked_keyword
from bigmodel.server.http.call_arguments import with_object
from bigmodel.server.http.errors import DISAGREES
from bigmodel.server.http.neutral import NEUTRAL, asks_for_nothing

MAX_STOP_LENGTH = 256
MAX_STOPS = 16
MAX_BIASES = 4096
MAX_MESSAGES = 10_000
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 512
MAX_LABELS = 16


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from None
    return text


def _all_encodable(value: Any) -> Any:
    """``value`` as parsed from JSON, when every text in it, names of members included, is valid Unicode."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            _encodable(part)
        elif isinstance(part, dict):
            pending += (*part.keys(), *part.values())
        elif isinstance(part, list):
            pending += part
    return value


Text = Annotated[str, AfterValidator(_encodable)]
FreeObject = Annotated[dict[str, Any], AfterValidator(_all_encodable)]
"""An object with arbitrary members: a tool, a schema, arguments of a template."""
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _few_labels(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_LABELS:
        raise ValueError(f"has {len(given)} labels; at most {MAX_LABELS} are accepted")
    return given


Labels = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], BeforeValidator(_few_labels)
]
"""Labels of the client's own."""


def _shape(given: Any) -> str:
    return "an object" if isinstance(given, dict | BaseModel) else "a string"


BY_SHAPE = Discriminator(_shape)
"""Tells what has the tag "a string" from what has the tag "an object": errors are about the one that was meant."""


def disagrees(field: str, why: str) -> PydanticCustomError:
    """The validation error of a ``field`` that contradicts another one."""
    return PydanticCustomError(DISAGREES, why, {"field": field})


class Body(BaseModel):
    """Strict types, no unknown fields.

    A field that is null counts as not given, known or not, and so does one of another server with a value that asks for
    nothing, see :mod:`bigmodel.server.http.neutral`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drop fields that are null, and all unknown ones but the first: one is enough to refuse the body."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        found = {name: given[name] for name in known & given.keys() if given[name] is not None}
        neutral = NEUTRAL.get(cls.__name__, {})
        others = (name for name in given if name not in known and given[name] is not None)
        unknown = next((name for name in others if not asks_for_nothing(neutral, name, given[name])), None)
        return found if unknown is None else {**found, unknown: given[unknown]}


# --- sampling -----------------------------------------------------------------------------------------


def _short(text: str) -> str:
    if not 1 <= len(text) <= MAX_STOP_LENGTH:
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, not {len(text)}")
    return text


def _few_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"has {len(given)} tokens; at most {MAX_BIASES} are accepted")
    return given


StopString = Annotated[
    Text,
    AfterValidator(_short),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}),
]


FewTokens = Annotated[list[TokenId], Field(max_length=MAX_BIASES, fail_fast=True)]


class StreamOptions(Body):
    include_usage: bool = False


class JsonSchema(Body):
    name: Text
    schema_: FreeObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise disagrees("json_schema", "is required with type 'json_schema', and only there")
        return self


class Sampling(Body):
    """The fields that completions and chat share. ``user`` is the client's own label."""

    model: Text
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: (
        Annotated[dict[Text, Annotated[Number, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop_token_ids: FewTokens | None = None
    allowed_token_ids: Annotated[FewTokens, Field(min_length=1)] | None = None
    timeout: Annotated[Number, Field(gt=0)] | None = None
    user: Text | None = None

    @model_validator(mode="after")
    def _options_only_when_streaming(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise disagrees("stream_options", "is only allowed with stream=true")
        if self.min_tokens and self.allowed_token_ids is not None:
            raise disagrees("min_tokens", "is not supported together with allowed_token_ids")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that bounds the generated tokens."""
        return "max_tokens", self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


# --- tools --------------------------------------------------------------------------------------------


_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a function's name has 1 to 64 letters, digits and characters of _ - . : /")
    return text


FunctionName = Annotated[
    Text, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]


class Function(Body):
    name: FunctionName
    description: Text | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> Function:
        if (self.parameters or {}).get("type", "object") != "object":
            raise disagrees("parameters.type", "must be 'object': a function's arguments have names")
        unchecked = unchecked_keyword(self.parameters) if self.strict else None
        if unchecked is not None:
            raise disagrees("parameters", f"'{unchecked}' is not supported for a strict function")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of the arguments."""
        return {"type": "object", **(self.parameters or {"properties": {}})}


class Tool(Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": self.type, "function": {**function, "parameters": self.function.arguments}}


def _few(given: Any) -> Any:
    if isinstance(given, list) and len(given) > MAX_TOOLS:
        raise ValueError(f"has {len(given)} tools; at most {MAX_TOOLS} are accepted")
    return given


def _distinct(tools: list[Tool]) -> list[Tool]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise disagrees(f"{index}.function.name", f"'{tool.function.name}' is the name of another tool too")
        names.add(tool.function.name)
    return tools


ToolList = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_few), AfterValidator(_distinct)]


class FunctionChoice(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")] | Annotated[NamedTool, Tag("an object")],
    BY_SHAPE,
]


# --- chats --------------------------------------------------------------------------------------------


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[FreeObject], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _content_given(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise disagrees("content", f"is required in a message of the role '{self.role}'")
        return self

    def plain(self, *, arguments_as_objects: bool = True) -> dict[str, Any]:
        """The message as chat templates expect it: text content as one string, no absent fields."""
        message: dict[str, Any] = {"role": self.role}
        content = self.content
        message["content"] = "".join(p.text for p in content) if isinstance(content, list) else content or ""
        for field in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        if self.tool_calls:
            calls = self.tool_calls
            message["tool_calls"] = [with_object(call) for call in calls] if arguments_as_objects else calls
            if self.reasoning_content is not None and not message["content"]:
                message["thinking"] = self.reasoning_content  # its name in gpt-oss' template
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateFields(Body):
    """How a chat template is to write a conversation."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: FreeObject | None = None

    @model_validator(mode="after")
    def _one_end(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise disagrees("continue_final_message", "is not allowed with add_generation_prompt=true")
        return self

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the template is given beside messages and tools."""
        whole = not self.continue_final_message
        prompted = whole if self.add_generation_prompt is None else self.add_generation_prompt
        going_on = {} if whole else {"continue_final_message": True}
        return {**(self.chat_template_kwargs or {}), **going_on, "add_generation_prompt": prompted}


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(Sampling, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    documents: Annotated[list[FreeObject], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = False
    metadata: Labels | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise disagrees("top_logprobs", "is only allowed with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise disagrees("max_completion_tokens", "is not what max_tokens says; give one of them")
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> ChatBody:
        given = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in given:
            raise disagrees("tool_choice", f"'{self.tool_choice.function.name}' is not among the tools")
        if self.tool_choice == "required" and not given:
            raise disagrees("tool_choice", "is 'required', but there are no tools")
        if self.functions and self.response_format is not None and self.response_format.type != "text":
            raise disagrees("response_format", "is not supported together with tools; set tool_choice to 'none'")
        return self

    @property
    def functions(self) -> dict[str, Function]:
        """The functions that the answer may call, by name."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        given = () if self.tool_choice == "none" else self.tools or ()
        return {tool.function.name: tool.function for tool in given if named in (None, tool.function.name)}

    @property
    def call_required(self) -> bool:
        """Whether the answer has to be a call, or several."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def single_call(self) -> bool:
        """Whether the answer may have one call at most."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)

    @property
    def limit(self) -> tuple[str, int | None]:
        """As for completions; ``max_completion_tokens`` is the newer name."""
        newer = self.max_completion_tokens
        return super().limit if newer is None else ("max_completion_tokens", newer)

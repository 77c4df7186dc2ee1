"""Bodies of POST requests. Unknown fields are refused, not ignored.

Validation ends at the first item of a list that is wrong: an error for each of a million items would take minutes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from bigmodel.server.http.errors import DISAGREES

MAX_STOP_LENGTH = 256


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from None
    return text


def _short(text: str) -> str:
    if not 1 <= len(text) <= MAX_STOP_LENGTH:
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, not {len(text)}")
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
StopString = Annotated[
    Text,
    AfterValidator(_short),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}),
]


MAX_STOPS = 16
MAX_BIASES = 4096
MAX_MESSAGES = 10_000
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20


def _few_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"has {len(given)} tokens; at most {MAX_BIASES} are accepted")
    return given


def _disagrees(field: str, why: str) -> PydanticCustomError:
    """The validation error of a ``field`` that contradicts another one."""
    return PydanticCustomError(DISAGREES, why, {"field": field})


class Body(BaseModel):
    """Strict types, no unknown fields. A field that is null counts as not given, known or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drop fields that are null, and all unknown ones but the first: one is enough to refuse the body."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        found = {name: given[name] for name in known & given.keys() if given[name] is not None}
        unknown = next((name for name in given if name not in known and given[name] is not None), None)
        return found if unknown is None else {**found, unknown: given[unknown]}


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
            raise _disagrees("json_schema", "is required with type 'json_schema', and only there")
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
    timeout: Annotated[Number, Field(gt=0)] | None = None
    user: Text | None = None

    @model_validator(mode="after")
    def _options_only_when_streaming(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise _disagrees("stream_options", "is only allowed with stream=true")
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


Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)
        ]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _disagrees("best_of", "is not supported where it is not n")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """One message. ``tool_calls`` and ``tool_call_id`` are passed to the chat template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[FreeObject], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _content_given(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise _disagrees("content", f"is required in a message of the role '{self.role}'")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: text content as one string, no absent fields."""
        message: dict[str, Any] = {"role": self.role}
        content = self.content
        message["content"] = "".join(p.text for p in content) if isinstance(content, list) else content or ""
        for field in ("name", "tool_calls", "tool_call_id"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[FreeObject], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: FreeObject | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise _disagrees("top_logprobs", "is only allowed with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _disagrees("max_completion_tokens", "is not what max_tokens says; give one of them")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """As for completions; ``max_completion_tokens`` is the newer name."""
        newer = self.max_completion_tokens
        return super().limit if newer is None else ("max_completion_tokens", newer)


class TokenizeBody(Body):
    """POST /tokenize: a text, or the messages of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise _disagrees("prompt", "give either it or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

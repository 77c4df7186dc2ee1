"""The bodies of requests. A field that is not here is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from bigmodel.server.body_errors import DISAGREES
from bigmodel.server.fields import FreeObject, Number, StopString, Text, TokenId

MAX_STOPS = 16
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20


def _disagrees(field: str, why: str) -> PydanticCustomError:
    """What is raised about ``field`` when it does not go with another one."""
    return PydanticCustomError(DISAGREES, why, {"field": field})


class Body(BaseModel):
    """Strict types, no unknown fields. A field that is null is a field not given, whether it is known or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


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
    """The fields that completions and chat share. ``user`` is a label for the client's own use."""

    model: Text
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: dict[Text, Annotated[Number, Field(ge=-100, le=100)]] | None = None
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
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that bounds the tokens generated, and what it says."""
        return "max_tokens", self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
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
    """One message. ``tool_calls`` and ``tool_call_id`` go to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[FreeObject] | None = None
    tool_call_id: Text | None = None
    refusal: None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it: text content as one string, absent fields absent."""
        message: dict[str, Any] = {"role": self.role}
        content = self.content
        message["content"] = "".join(p.text for p in content) if isinstance(content, list) else content or ""
        for field in ("name", "tool_calls", "tool_call_id"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        return message


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[FreeObject] | None = None
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
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
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
    tokens: list[TokenId]

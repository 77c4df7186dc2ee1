"""Base classes of all request bodies. Unknown fields are refused, not ignored.

Validation ends at the first item of a list that is wrong: an error for each of a million items would take minutes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bigmodel.server.http.errors import DISAGREES
from bigmodel.server.http.neutral import NEUTRAL, asks_for_nothing

MAX_STOP_LENGTH = 256
MAX_STOPS = 16
MAX_BIASES = 4096
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
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


def _type_of(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return f"the type {kind}" if isinstance(kind, str) else None


def by_type(*names: str) -> Discriminator:
    """Tell objects apart by their ``type``; each has the tag "the type NAME"."""
    return Discriminator(
        _type_of,
        custom_error_type="object_type",
        custom_error_message=f"must be an object of the type {', '.join(names[:-1])} or {names[-1]}",
    )


def string_or_type(*names: str) -> Discriminator:
    """Tell "a string" from objects, which have the tag "the type NAME"; an object of no known type is of the first."""

    def tag(given: Any) -> str:
        kind = _type_of(given)
        if not isinstance(given, dict | BaseModel):
            return "a string"
        return kind if kind in {f"the type {name}" for name in names} else f"the type {names[0]}"

    return Discriminator(tag)


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


def release(*bodies: Body) -> None:
    """Free what bodies hold, which nobody reads any more: FastAPI keeps a body until its request is answered.

    One of very many messages takes forty times its bytes, and five times what the engine keeps of it.
    """
    for body in bodies:
        body.__dict__.clear()


def release_field(body: Body, name: str) -> None:
    """Free what one field of a body holds, which nobody reads any more."""
    del body.__dict__[name]


class CacheControl(Body):
    """A hint that has no effect: every prompt's beginning is kept for later ones, where there is memory."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cached(Body):
    """What may have such a hint."""

    cache_control: CacheControl | None = None


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
    continuous_usage_stats: bool = False


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
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
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
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
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

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage up to it, as vLLM's have: with ``include_usage`` only."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

"""Bodies of chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from bigmodel.server.http.bodies import (
    MAX_TOP_LOGPROBS,
    Body,
    Cached,
    FreeObject,
    Labels,
    Sampling,
    Text,
    by_type,
    disagrees,
)
from bigmodel.server.http.call_arguments import with_object
from bigmodel.server.http.tool_bodies import AllowedToolsChoice, Function, NamedTool, ToolChoice, ToolList

MAX_MESSAGES = 10_000


class TextPart(Cached):
    type: Literal["text"]
    text: Text


class RefusalPart(Cached):
    """Text by which an earlier answer refused, as a part of a message of the assistant."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The whole text."""
        return self.refusal


class ImageURL(Body):
    """An image as a data URL. How much detail is looked at is the model's own."""

    url: Text
    detail: Literal["auto"] | None = None


class ImagePart(Cached):
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[
    Annotated[TextPart, Tag("the type text")]
    | Annotated[ImagePart, Tag("the type image_url")]
    | Annotated[RefusalPart, Tag("the type refusal")],
    by_type("text", "image_url", "refusal"),
]


class Message(Cached):
    """One message, also as other servers answer with it: its reasoning has two names, the second that of newer vLLM.

    Some clients, lm-eval up to 0.4.9 among them, give it the type "text", which says nothing.
    """

    type: Literal["text"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[FreeObject], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    reasoning_details: Annotated[list[None], Field(max_length=0)] | None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _content_given(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise disagrees("content", f"is required in a message of the role '{self.role}'")
        if self.images and self.role != "user":
            raise disagrees("content", "may have images in a message of the role 'user' alone")
        if self.role != "assistant" and any(isinstance(part, RefusalPart) for part in self.content or ()):
            raise disagrees("content", "may have refusals in a message of the role 'assistant' alone")
        if None not in (self.reasoning, self.reasoning_content) and self.reasoning != self.reasoning_content:
            raise disagrees("reasoning", "is not what reasoning_content says; give one of them")
        return self

    @property
    def images(self) -> list[str]:
        """URLs of its images."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def _parts(self) -> list[dict[str, str]]:
        """The content as chat templates expect it beside images: text, and a place for each image."""
        if not isinstance(self.content, list):
            return [{"type": "text", "text": self.content or ""}]
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
            for part in self.content
        ]

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part.text for part in self.content if not isinstance(part, ImagePart))

    def plain(self, *, arguments_as_objects: bool = True, in_parts: bool = False) -> dict[str, Any]:
        """The message as chat templates expect it: content as one string or ``in_parts``, no absent fields."""
        message: dict[str, Any] = {"role": self.role, "content": self._parts() if in_parts else self._text()}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        fields = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        message |= {name: value for name, value in fields.items() if value is not None}
        if self.tool_calls:
            calls = self.tool_calls
            message["tool_calls"] = [with_object(call) for call in calls] if arguments_as_objects else calls
            if thought is not None and not message["content"]:
                message["thinking"] = thought  # its name in gpt-oss' template
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
        """Arguments of the template beside messages and tools."""
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
        for name in self._named or ():
            if name not in given:
                raise disagrees("tool_choice", f"'{name}' is not among the tools")
        if self.tool_choice == "required" and not given:
            raise disagrees("tool_choice", "is 'required', but there are no tools")
        return self

    @property
    def functions(self) -> dict[str, Function]:
        """The functions that the answer may call, by name."""
        named = self._named
        given = () if self.tool_choice == "none" else self.tools or ()
        return {tool.function.name: tool.function for tool in given if named is None or tool.function.name in named}

    @property
    def _named(self) -> list[str] | None:
        """Names of the functions that `tool_choice` allows; None for all."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [choice.function.name]
        if isinstance(choice, AllowedToolsChoice):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return None

    @property
    def call_required(self) -> bool:
        """Whether the answer has to be a call, or several."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def single_call(self) -> bool:
        """Whether the answer may have one call at most."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)

    @property
    def limit(self) -> tuple[str, int | None]:
        """As for completions; ``max_completion_tokens`` is the newer name."""
        newer = self.max_completion_tokens
        return super().limit if newer is None else ("max_completion_tokens", newer)

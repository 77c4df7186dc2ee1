"""Bodies of the tokens of a text or of a chat, and of the text of tokens. The fields are those of vLLM's server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from bigmodel.server.http.bodies import Body, Text, TokenId, disagrees
from bigmodel.server.http.chat_bodies import Messages, TemplateFields
from bigmodel.server.http.tool_bodies import ToolList

_OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class TokenizeBody(TemplateFields):
    """POST /tokenize: a text, or the messages of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: ToolList | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise disagrees("prompt", "give either it or messages")
        for name in _OF_CHATS:
            if self.prompt is not None and name in self.model_fields_set:
                raise disagrees(name, "is only allowed with messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

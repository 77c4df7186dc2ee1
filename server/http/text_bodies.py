"""Bodies of the other POST requests: completions of a text, its tokens, and the text of tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from bigmodel.server.http.bodies import MAX_TOP_LOGPROBS, Body, Messages, Sampling, Text, TokenId, disagrees


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
            raise disagrees("best_of", "is not supported where it is not n")
        return self


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
            raise disagrees("prompt", "give either it or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

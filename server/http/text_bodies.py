"""Bodies of completions of a text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from bigmodel.server.http.bodies import MAX_TOP_LOGPROBS, Sampling, Text, TokenId, disagrees


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

"""Bodies of embeddings and of ranking documents: the fields of OpenAI's, Jina's, Cohere's and vLLM's interfaces."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from bigmodel.server.http.bodies import BY_SHAPE, Body, Text, TokenId, disagrees

MAX_INPUTS = 2048
MAX_DOCUMENTS = 2048

Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    model: Text
    input: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    user: Text | None = None

    @property
    def inputs(self) -> list[Any]:
        """The inputs, each a text or a list of tokens."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @model_validator(mode="after")
    def _some_tokens(self) -> EmbeddingsBody:
        if self.truncate_prompt_tokens == 0:
            raise disagrees("truncate_prompt_tokens", "must be at least 1, or -1 for as many as the model takes")
        return self


class Document(Body):
    """A document as an object."""

    text: Text


GivenDocument = Annotated[Annotated[Text, Tag("a string")] | Annotated[Document, Tag("an object")], BY_SHAPE]


class RerankBody(Body):
    """POST /v1/rerank."""

    model: Text
    query: Text
    documents: Annotated[list[GivenDocument], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_documents: bool = True
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=-1)] | None = None
    user: Text | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

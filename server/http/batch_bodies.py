"""Bodies of batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bigmodel.server.http.bodies import Body, Labels, Text

HOUR, MONTH = 3600, 30 * 24 * 3600


class ExpiresAfter(Body):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=MONTH)]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Labels | None = None
    output_expires_after: ExpiresAfter | None = None

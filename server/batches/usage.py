"""The tokens that the answers of a batch took, added up."""

from __future__ import annotations

import json
from json import JSONDecoder
from typing import Any

from pydantic import BaseModel, ConfigDict

_DECODER = JSONDecoder()


class BatchUsage(BaseModel):
    """Tokens of all answers; the two others are among those before them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: BatchUsage) -> BatchUsage:
        names = BatchUsage.model_fields
        return BatchUsage(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def view(self) -> dict[str, Any] | None:
        """The object that clients see; None where nothing was counted."""
        if not self.input_tokens:
            return None
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def usage_of(body: bytes) -> BatchUsage:
    """Return the usage that an answer says; nothing where it says none.

    The answer is not parsed whole: those of embeddings are long. Within a text of JSON, quotes are escaped.
    """
    at = body.rfind(b'"usage":')
    if at < 0:
        return BatchUsage()
    try:
        found, _ = _DECODER.raw_decode(body[at + len(b'"usage":') :].decode(errors="replace").lstrip())
    except json.JSONDecodeError:
        return BatchUsage()
    return BatchUsage(
        input_tokens=_count(found, "prompt_tokens") or _count(found, "input_tokens"),
        cached_tokens=_count(found, "prompt_tokens_details", "cached_tokens")
        or _count(found, "input_tokens_details", "cached_tokens"),
        output_tokens=_count(found, "completion_tokens") or _count(found, "output_tokens"),
        reasoning_tokens=_count(found, "completion_tokens_details", "reasoning_tokens")
        or _count(found, "output_tokens_details", "reasoning_tokens"),
    )


def _count(found: Any, *path: str) -> int:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) else 0

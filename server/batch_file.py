"""Files of prompts, and of their answers, one JSON object a line. A run that was interrupted goes on where it ended.

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 32}
    {"id": "b", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0.7}
    {"id": "c", "prompt": "Whereas", "adapter": "legal"}

Without an `id` a prompt has the number of its line. Answers are appended in the order in which they end:

    {"id": "a", "text": " there was", "finish_reason": "stop", "prompt_tokens": 4, "completion_tokens": 3}
    {"id": "b", "error": "prompt 1 has 9000 tokens; ..."}
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bigmodel.errors import ServeError
from bigmodel.server.batch import Generation
from bigmodel.server.engine.scheduling.request import SamplingParams
from bigmodel.server.text.codec import TextCodec

MOST_BYTES = 64 * 2**20
"""Length of a line, at most."""

_BEGIN = b'{"id": '
"""First bytes of every line of an answer."""


class PromptLine(BaseModel):
    """One line of a file of prompts. What it leaves out is as the command line has it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str | int | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    adapter: str | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> PromptLine:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self

    def ids(self, codec: TextCodec) -> list[int]:
        """Return the token ids of the prompt, or of the messages by the chat template."""
        if self.messages is not None:
            return codec.encode(codec.render_chat(self.messages), add_special_tokens=False)
        assert self.prompt is not None
        return codec.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt

    def adapter_of(self, known: Sequence[str]) -> str:
        """Return the name of the prompt's adapter, "" for the model itself: the only one there is if it names none.

        Raises ServeError for one that is not known, and where it names none of several.
        """
        if self.adapter is None:
            if len(known) > 1:
                raise ServeError(f'it names no adapter; there are {", ".join(known)}, and "" for the model itself')
            return known[0] if known else ""
        if self.adapter and self.adapter not in known:
            raise ServeError(f"there is no adapter '{self.adapter}'; there are {', '.join(known) or 'none'}")
        return self.adapter

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters, those of `default` where the line has none."""
        stop = default.stop if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(
            default.max_tokens if self.max_tokens is None else self.max_tokens,
            default.temperature if self.temperature is None else self.temperature,
            default.top_p if self.top_p is None else self.top_p,
            default.top_k if self.top_k is None else self.top_k,
            seed=default.seed if self.seed is None else self.seed,
            stop=stop,
        )


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts, read line by line from its beginning each time.

    Attributes:
        path: Where it is.
    """

    path: Path

    def __iter__(self) -> Iterator[tuple[str | int, PromptLine]]:
        """Yield the prompts with their ids.

        Raises:
            ServeError: A line is not one of a prompt, or an id occurs twice; the message has the number of the line.
        """
        seen: set[str | int] = set()
        with self.path.open("rb") as file:
            for number, text in enumerate(_lines(file), 1):
                if not text.strip():
                    continue
                line = self._parsed(number, text)
                name = number if line.id is None else line.id
                if name in seen:
                    raise ServeError(f"{self.path}, line {number}: the id {name!r} occurs twice; give another")
                seen.add(name)
                yield name, line

    def _parsed(self, number: int, text: bytes) -> PromptLine:
        if len(text) > MOST_BYTES:
            raise ServeError(f"{self.path}, line {number}: it has more than {MOST_BYTES} bytes")
        try:
            return PromptLine.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ServeError(f"{self.path}, line {number}: {where + ': ' if where else ''}{first['msg']}") from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MOST_BYTES + 1):
        yield line


class AnswerFile:
    """A file that answers are appended to.

    Attributes:
        done: Ids of the prompts that have an answer, or an error.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.done: set[str | int] = set()
        complete = 0
        for line in _lines(file):
            if not line.endswith(b"\n"):
                break  # a run ended while it was written
            complete += len(line)
            self.done.add(_id_of(line))
        file.truncate(complete)
        file.seek(complete)

    def append(self, name: str | int, outcome: Generation | ServeError) -> None:
        """Append an answer, or the error in its place."""
        found: dict[str, Any] = {"id": name}
        if isinstance(outcome, ServeError):
            found["error"] = str(outcome)
        else:
            found |= {
                "text": outcome.text,
                "finish_reason": outcome.finish_reason,
                "prompt_tokens": outcome.prompt_tokens,
                "completion_tokens": len(outcome.token_ids),
            }
        self._file.write(json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()
        self.done.add(name)


@contextmanager
def answers_in(path: Path, prompts: PromptFile) -> Iterator[AnswerFile]:
    """Open or create the file of answers to `prompts`.

    Raises:
        ServeError: It has answers to other prompts, it is no file of answers, or another process writes it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(f"{path}: another process writes it; give another file") from None
        _refuse_others(path, file, {name for name, _ in prompts})
        file.seek(0)
        yield AnswerFile(file)


def _refuse_others(path: Path, file: BinaryIO, known: set[str | int]) -> None:
    """Raise before anything is changed in a file that is not one of answers to these prompts."""
    for number, line in enumerate(_lines(file), 1):
        if not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
            return  # a run ended while it was written
        try:
            name = _id_of(line)
        except (ValueError, KeyError, TypeError):
            raise ServeError(f"{path}, line {number}: it is no answer; give another file") from None
        if name not in known:
            raise ServeError(
                f"{path}, line {number}: it answers {name!r}, which is none of the prompts; give another file"
            )


def _id_of(line: bytes) -> str | int:
    name = json.loads(line)["id"]
    if not isinstance(name, (str, int)):
        raise TypeError("an id is a string or a number")
    return name

"""Tokenising long texts outside the server, each in a process of its own, which ends when nobody waits for the tokens.

A tokenizer cannot be stopped within a text, and of some texts it makes tokens for minutes. The processes are forked
from one that has the tokenizer alone. That one is started at the first long text: it takes a second and the memory of
the vocabulary, which servers of short texts do not need.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NoReturn

from bigmodel.errors import ServeError
from bigmodel.server import forked

LONG = 16 << 10
"""Characters from which a text is tokenised outside the server. Usual tokenizers take 8 to 40 ms and 1 to 6 MB for so
many; to fork a process takes up to 20 ms."""

START_SECONDS = 60.0
"""Limit of elapsed time for loading the tokenizer."""

SECONDS, SECONDS_PER_BYTE = 5.0, 8e-6
"""Limit of processor time for a text: usual tokenizers take 0.5 to 3 microseconds a byte."""

MEMORY_BYTES, MEMORY_PER_BYTE = 256 << 20, 1 << 10
"""Memory limit for a text, in addition to that of the process: usual tokenizers take 100 to 900 bytes a byte."""

STACK_BYTES = 8 << 20
"""Stack limit for a text."""

left: ContextVar[Future[None] | None] = ContextVar("left", default=None)
"""Done as soon as nobody waits any more for what is done in a context; None where somebody always does."""

_DONE, _FAILED = b"+", b"-"


class EncodeError(ServeError, ValueError):
    """The tokenizer failed at a text, or takes too much for it."""


class EncoderGoneError(EncodeError):
    """The process that tokenises is busy or gone; the text is not at fault."""


# --- in the server ------------------------------------------------------------------------------------


class LongTexts:
    """Tokenises long texts in processes of their own, with the tokens that the tokenizer makes itself. Thread-safe.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._usable = _has_rust_alone(tokenizer)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def encode(
        self, texts: Sequence[str], wanted: Sequence[str], leaves: Future[None], *, special: bool
    ) -> list[list[int]] | None:
        """Return tokens of a text, or of two that belong together; None where the calling thread has to make them.

        It has to for tokenizers that are written in Python, wholly or in parts, or that cannot be written as JSON: what
        they do ends for nobody.

        Args:
            texts: One, or two.
            wanted: Attributes of an encoding: `ids`, `type_ids` or `offsets`, which come as one list of beginnings and
                ends; or `count`, a list of the number of tokens alone.
            leaves: Done as soon as nobody waits any more.
            special: Whether to add special tokens.

        Raises:
            EncodeError: The tokenizer fails, takes too much time or memory, or nobody waits any more.
            EncoderGoneError: There is no process for it now.
        """
        if not self._usable:
            return None
        written = [text.encode("utf-8", "surrogatepass") for text in texts]
        content = b"".join(written)
        asked = {
            "sizes": list(map(len, written)),
            "wanted": list(wanted),
            "special": special,
            "seconds": SECONDS + SECONDS_PER_BYTE * len(content),
            "memory": MEMORY_BYTES + MEMORY_PER_BYTE * len(content),
        }
        connection = self._asked(json.dumps(asked).encode(), content)
        if connection is None:
            return None
        with connection:
            leaves.add_done_callback(lambda _: _hang_up(connection))
            answer = _received(connection)
        if leaves.done():
            raise EncodeError("nobody waits for the tokens any more")
        if answer[:1] == _FAILED:
            raise EncodeError(f"the tokenizer failed: {answer[1:].decode()}")
        found = array("Q", answer[1:]) if answer[:1] == _DONE and len(answer) % 8 == 1 else array("Q")
        if not found or len(found) != found[0]:
            raise EncodeError("to tokenise the text takes too much time or memory; send less of it")
        lists, at = [], 1
        for _ in wanted:
            size = found[at]
            lists.append(found[at + 1 : at + 1 + size].tolist())
            at += 1 + size
        return lists

    def close(self) -> None:
        """End the process that forks, if it was started."""
        with self._lock:
            self._end()

    def _asked(self, header: bytes, content: bytes) -> socket.socket | None:
        """Have a child forked; return the socket to it, or None where the tokenizer cannot be had outside."""
        with self._lock:
            for _ in range(2):
                if self._control is None:
                    self._start()
                if not self._usable or self._control is None:
                    return None
                try:
                    return forked.ask(self._control, header, content, socket.SOCK_STREAM)
                except ConnectionError:  # it was ended from outside
                    self._end()
                except OSError as error:
                    raise EncoderGoneError("the process that tokenises is busy; try again") from error
        raise EncoderGoneError("the process that tokenises has ended; try again")

    def _start(self) -> None:
        """Start the process that forks, and wait until it has the tokenizer."""
        backend = self._tokenizer.backend_tokenizer
        try:
            text = backend.to_str()
        except Exception:  # it has parts that are written in Python
            self._usable = False
            return
        header = json.dumps({"split_special_tokens": bool(getattr(self._tokenizer, "split_special_tokens", False))})
        try:
            self._control, stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = forked.start(__name__, stdin)
            with forked.ask(self._control, header.encode(), text.encode(), socket.SOCK_STREAM) as connection:
                connection.settimeout(START_SECONDS)
                answer = _received(connection)
        except OSError as error:
            self._end()
            raise EncoderGoneError("the process that tokenises does not start; try again") from error
        if answer == _FAILED:
            self._end()
            self._usable = False
        elif answer != _DONE:
            self._end()
            raise EncoderGoneError("the process that tokenises does not start; try again")

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            forked.end(self._process)
        self._control = self._process = None


def _has_rust_alone(tokenizer: Any) -> bool:
    """Whether texts are tokenised by the Rust backend, with nothing in Python that a model's tokenizer adds to it."""
    kinds = type(tokenizer).__mro__
    backed = next((at for at, kind in enumerate(kinds) if "backend_tokenizer" in vars(kind)), None)
    if backed is None:
        return False
    return not any(name in vars(kind) for kind in kinds[:backed] for name in ("__call__", "encode", "_encode_plus"))


def _received(connection: socket.socket) -> bytes:
    """What comes until the other end is closed."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the answer has come
        connection.shutdown(socket.SHUT_RDWR)


# --- in the process that forks, and in its children ----------------------------------------------------


def _work(control: socket.socket) -> None:
    """Load the tokenizer that comes first; then fork a process for each text."""
    forked.prepare()
    children = forked.Children()
    pieces = forked.pieces(control, children)
    first = next(pieces, None)
    if first is None:
        return
    try:
        tokenizer = _loaded(first.content().decode())
    except Exception:  # whatever the library raises
        tokenizer = None
    if tokenizer is None:
        first.socket.sendall(_FAILED)
        return
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = json.loads(first.header)["split_special_tokens"]
    first.socket.sendall(_DONE)
    del first
    for piece in pieces:
        if children.fork():
            control.close()
            _tokenise(tokenizer, piece)


def _loaded(text: str) -> Any:
    """The tokenizer of a text as JSON; None if it would be another one."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer.from_str(text)
    if isinstance(tokenizer.model, models.Unigram):  # its scores are not read exactly from JSON
        model = json.loads(text)["model"]
        scores = [(piece, score) for piece, score in model["vocab"]]
        tokenizer.model = models.Unigram(scores, model["unk_id"], model["byte_fallback"])
    return tokenizer if tokenizer.to_str() == text else None


def _tokenise(tokenizer: Any, piece: forked.Piece) -> NoReturn:
    """Send the tokens of a text, or why there are none, and end the process."""
    connection = piece.socket
    try:
        asked, content = json.loads(piece.header), piece.content()
        forked.limit(asked["seconds"], asked["memory"], STACK_BYTES)
        forked.end_when_closed(connection)
        begin, texts = 0, []
        for size in asked["sizes"]:
            texts.append(content[begin : begin + size].decode("utf-8", "surrogatepass"))
            begin += size
        encoding = tokenizer.encode(*texts, add_special_tokens=asked["special"])
        found = array("Q", [0])
        for name in asked["wanted"]:
            values: Any = [len(encoding)] if name == "count" else getattr(encoding, name)
            flat = [each for pair in values for each in pair] if name == "offsets" else values
            found.append(len(flat))
            found.extend(flat)
        found[0] = len(found)
        answer = _DONE + found.tobytes()
    except BaseException as error:  # whatever the library raises
        answer = b"" if isinstance(error, MemoryError) else _FAILED + f"{type(error).__name__}: {error}"[:500].encode()
    try:
        forked.end_when_closed(connection, ends=False)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(answer)
    finally:
        os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=sys.stdin.fileno()) as given, suppress(ConnectionError, KeyboardInterrupt):
        _work(given)

"""Compiling grammars in a process of its own, with limits on time, memory and stack.

A schema is a program of its author's: compiling one may take minutes or gigabytes, or overflow the stack of the library
that compiles it. Here that ends a child of a worker process, not the server. The worker forks a child for each schema:
the libraries are imported once, whatever becomes of the children.

Server and worker exchange JSON texts over a socket, the worker's standard input. The first one describes the tokenizer;
then the expression of each answer is answered by a grammar or by an error. The worker ends, and its child with it, when
the socket is closed. Another process is forked from it at its start, for those that match answers with the grammars:
see :mod:`bigmodel.server.engine.sampling.grammar_matching`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from bigmodel.errors import ServeError
from bigmodel.server import forked
from bigmodel.server.engine.sampling.grammar_matching import GONE, MatchError, fork_matchers, start_matching
from bigmodel.server.engine.sampling.grammar_text import grammar_text

START_SECONDS = 60.0
"""Time limit of the worker for importing its libraries."""

COMPILE_SECONDS = 5.0
"""Limit of processor time for a schema."""

WAIT_SECONDS = 60.0
"""Limit of elapsed time for a schema, on a busy machine."""

GRACE_SECONDS = 10.0
"""Time that the worker has beyond `WAIT_SECONDS` to say that a schema is not compiled, before it is ended itself."""

NICE, NICER = 10, 19
"""Niceness of what compiles, at first and after `BRIEF_SECONDS`: beside a running request it has a tenth of a
processor, then less than a fiftieth."""

BRIEF_SECONDS = 0.25
"""Elapsed time within which most schemas are compiled. What has worked for so long has only processors that are idle
from then on: of a nice process, threads that wake are sent to processors where others run, or wait for it."""

MEMORY_BYTES = 1 << 30
"""Memory limit for a schema, in addition to the worker's memory at its start."""

STACK_BYTES = 2 << 20
"""Stack limit for a schema."""

GRAMMAR_BYTES = 8 << 20
"""Largest compiled grammar that is accepted, in memory and as it is sent."""

SHORT_SECONDS = 0.5
"""Processor time of a grammar that is compiled again from its text where it is used, once that has succeeded here.

xgrammar serialises all edges of a grammar once for each of its rules: that of 80 functions takes 30 ms and 1.2 MB to
compile, and 69 MB as text.
"""

MASK_SECONDS = 0.05
"""Limit of processor time for the mask of one token of a possible answer that is tried."""

WALK_SECONDS = 0.3
"""Time for which masks of a possible answer are tried after compiling."""

_TOO_LARGE = f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory; describe less of the answer"
_NOT_WITHIN = f"it is not compiled within {WAIT_SECONDS:g} seconds; describe less of the answer"


class CompileError(ServeError):
    """A schema was not compiled; the message says why."""


class WorkerEndedError(CompileError):
    """The process that compiles was ended from outside; the schema is not at fault."""


@dataclass(frozen=True)
class CompiledText:
    """A grammar that has been compiled: as xgrammar serialises it, or its own text."""

    text: str
    serialised: bool


class GrammarWorker:
    """The process whose children compile. Started at the first schema, and again if it ended. Thread-safe.

    Args:
        tokenizer_info: xgrammar's description of the tokenizer, serialised.
        stop_ids: tokens that end a text.
        seconds: how long the processor may work on a schema.
        together: most bytes of the processes that match answers.
    """

    def __init__(
        self,
        tokenizer_info: str,
        stop_ids: Sequence[int],
        seconds: float = COMPILE_SECONDS,
        together: int = forked.TOGETHER_BYTES,
    ) -> None:
        limits = {"seconds": seconds, "together": together}
        self._hello = json.dumps({"tokenizer": tokenizer_info, "stops": list(stop_ids), **limits})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._matching: socket.socket | None = None

    @property
    def runs(self) -> bool:
        """Whether the process runs, and the one that was forked from it. Takes little time."""
        process, matching = self._process, self._matching
        return process is not None and process.poll() is None and matching is not None and not _closed(matching)

    def start(self) -> None:
        """Start the process, unless it runs. Takes seconds.

        Raises:
            CompileError: it does not start.
        """
        with self._lock:
            if not self.runs:
                self._end()
                self._running()

    def match(self, text: bytes, serialised: bool) -> socket.socket:
        """Have a process forked that matches the answer of a sequence; see `start_matching`. Takes little time.

        Raises:
            MatchError: the worker was ended, or it has too much to do.
        """
        matching = self._matching
        if matching is None:
            raise MatchError(GONE)
        return start_matching(matching, text, serialised)

    def compile(self, expression: str) -> CompiledText:
        """Return the grammar of an answer: compiled and serialised, or its text where compiling it takes little.

        Args:
            expression: JSON text of it, see :mod:`bigmodel.server.engine.sampling.expressions`.

        Raises:
            CompileError: the schema is wrong or takes too much.
            WorkerEndedError: the worker was ended; the next call starts it again.
        """
        with self._lock:
            pipe = self._running()
            answer = self._ask(pipe, expression, WAIT_SECONDS + GRACE_SECONDS)
        if "error" in answer:
            raise CompileError(answer["error"])
        return CompiledText(str(answer["grammar"]), bool(answer["serialised"]))

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _running(self) -> Connection:
        if self._pipe is None:
            ours, stdin = socket.socketpair()
            self._process = forked.start(__name__, stdin)
            self._pipe = Connection(ours.detach())
            matching, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                started = self._ask(self._pipe, self._hello, START_SECONDS, theirs)
            self._matching = matching
            if "error" in started:
                self._end()
                raise CompileError(f"the grammar worker does not start: {started['error']}")
        return self._pipe

    def _ask(self, pipe: Connection, text: str, seconds: float, given: socket.socket | None = None) -> dict[str, Any]:
        try:
            pipe.send_bytes(text.encode())
            if given is not None:
                send_handle(pipe, given.fileno(), None)
            if not pipe.poll(seconds):
                self._end()
                raise CompileError(_NOT_WITHIN)
            answer: dict[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._end()
            raise WorkerEndedError("the process that compiles it ended; try again") from error
        return answer

    def _end(self) -> None:
        """End the process and its child."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            forked.end(self._process)  # it ends its child, then itself
        if self._matching is not None:
            self._matching.close()
        self._pipe = self._process = self._matching = None


def _closed(connection: socket.socket) -> bool:
    """Whether the other end is closed; nothing ever comes from it."""
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _work(pipe: Connection) -> None:
    """Answer schemas until the pipe is closed."""
    forked.prepare()
    hello = json.loads(pipe.recv_bytes())
    try:
        import torch
        import xgrammar

        torch.set_num_threads(1)
        info = xgrammar.TokenizerInfo.deserialize_json(hello["tokenizer"])
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        stops = tuple(hello["stops"])
        with socket.socket(fileno=recv_handle(pipe)) as control:
            if not os.fork():
                pipe.close()
                fork_matchers(control, xgrammar, compiler, info, stops, hello["together"])
                os._exit(0)
    except Exception as error:
        pipe.send_bytes(_error(f"{type(error).__name__}: {error}"))
        return
    pipe.send_bytes(b"{}")
    os.nice(NICE - os.nice(0))  # running requests come first; the first schema waits for the imports
    while True:
        expression = pipe.recv_bytes().decode()
        compiled = partial(_compiled, xgrammar, compiler, expression, info.vocab_size, bool(stops))
        pipe.send_bytes(_in_child(pipe, compiled, hello["seconds"]))


def _in_child(pipe: Connection, function: Callable[[], bytes], seconds: float) -> bytes:
    """Return what `function` returns in a child process with limits, or the error that says which one it passed.

    Args:
        pipe: To the server.
        function: Runs in the child.
        seconds: Limit of its processor time.

    Raises:
        EOFError: The server has closed `pipe` meanwhile; the child is ended.
    """
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if not child:
        try:
            # Its main thread has the least stack that a thread of the server has: there short grammars compile again.
            forked.limit(seconds, MEMORY_BYTES, STACK_BYTES)
            theirs.send_bytes(function())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        ready = wait([ours, pipe], BRIEF_SECONDS)
        if not ready:
            ready = _wait_behind_others(child, [ours, pipe])
        answer = None
        if ours in ready:
            with suppress(EOFError):
                answer = ours.recv_bytes()
        if answer is None and ours not in ready:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if pipe in ready:
        raise EOFError
    if not ready:
        return _error(_NOT_WITHIN)
    if answer is None:
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        what = "time" if late else f"memory or stack (more than {MEMORY_BYTES >> 20} or {STACK_BYTES >> 20} MiB)"
        return _error(f"compiling it takes too much {what}; describe less of the answer")
    return answer


def _wait_behind_others(child: int, connections: list[Connection]) -> list[Any]:
    """Let a child compute behind everything else, and return which connections are ready within `WAIT_SECONDS`."""
    os.setpriority(os.PRIO_PROCESS, child, NICER)
    end = time.monotonic() + WAIT_SECONDS
    if not hasattr(os, "SCHED_IDLE"):
        return wait(connections, WAIT_SECONDS)
    while _processor_seconds(child) < BRIEF_SECONDS:  # on a busy machine it has not had its brief time yet
        ready = wait(connections, BRIEF_SECONDS)
        if ready or time.monotonic() > end:
            return ready
    with suppress(OSError):  # some sandboxes forbid it: it stays nice there
        os.sched_setscheduler(child, os.SCHED_IDLE, os.sched_param(0))
    return wait(connections, max(0.0, end - time.monotonic()))


def _processor_seconds(process: int) -> float:
    """Return how long a process has computed."""
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _compiled(xgrammar: Any, compiler: Any, expression: str, vocabulary_size: int, has_stops: bool) -> bytes:
    """Compile a grammar and return the answer to the server."""
    try:
        text = grammar_text(xgrammar, json.loads(expression))
        began = time.thread_time()
        compiled = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text))
        short = time.thread_time() - began < SHORT_SECONDS
        _try_masks(xgrammar, compiled, vocabulary_size, has_stops)
        grammar = text if short else compiled.serialize_json()
        size = max(len(grammar), compiled.memory_size_bytes)
        if size > GRAMMAR_BYTES:
            raise ValueError(f"it compiles to {size} bytes, more than {GRAMMAR_BYTES}")
    except MemoryError:
        return _error(_TOO_LARGE)
    except Exception as error:  # whatever the library throws
        return _error(_TOO_LARGE if "bad_alloc" in str(error) else _last_line(error))
    return json.dumps({"grammar": grammar, "serialised": not short}).encode()


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


def _try_masks(xgrammar: Any, compiled: Any, vocabulary_size: int, has_stops: bool) -> None:
    """Raise ValueError if no token can begin an answer, or choosing a token of a possible answer takes too long."""
    import torch

    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not has_stops)
    mask = xgrammar.allocate_token_bitmask(1, vocabulary_size)
    generator = torch.Generator().manual_seed(0)
    end = time.thread_time() + WALK_SECONDS
    first = True
    while time.thread_time() < end and not matcher.is_terminated():
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        seconds = time.thread_time() - began
        scores = torch.rand(1, vocabulary_size, generator=generator)
        xgrammar.apply_token_bitmask_inplace(scores, mask)
        token = int(scores.argmax())
        if scores[0, token] == -torch.inf:
            if first:
                raise ValueError("no answer fits it that this model could begin")
            return
        if seconds > MASK_SECONDS:
            raise ValueError(f"choosing one token of the answer takes {seconds:.2f} seconds; describe less of it")
        matcher.accept_token(token)
        first = False


def _last_line(error: Exception) -> str:
    """Return xgrammar's message without its source location."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return text.split(": ", 1)[-1] if text.startswith("[") else text


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        _work(Connection(sys.stdin.fileno()))

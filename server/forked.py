"""Work that may take too long or too much memory, each piece in a process of its own: whatever becomes of it, the
server goes on.

The processes are forked from one that has imported the libraries. The server starts that one with `start`, and asks it
with `ask`; it reads what is asked with `pieces`, and forks with `Children`, which limits what all of them take. The
child of a piece calls `limit`.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

TOGETHER_BYTES = 1 << 30
"""Memory limit of all children of one process together. An ordinary one takes a few MB."""

WATCH_SECONDS = 0.1
"""How often it is looked what children take."""

_HEADER_BYTES = 1 << 10


# --- in the server ------------------------------------------------------------------------------------


def start(module: str, stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Run a module in a new process, which is connected to the server by its standard input."""
    with stdin:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=stdin.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that ends itself, as what it reads is closed; end it, and its group, if it is not given the
    processor."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):  # it has not made its group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def ask(control: socket.socket, header: bytes, content: bytes, kind: socket.SocketKind) -> socket.socket:
    """Have a child forked for a piece of work; return the socket to it. Takes little time.

    Args:
        control: To the process that forks; of the kind SOCK_SEQPACKET.
        header: What is to be done, in few bytes.
        content: The content of the file that the child gets.
        kind: Of the socket to the child.

    Raises:
        OSError: There is no such process, or it has too much to do.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    file = os.memfd_create("content")
    try:
        with theirs, open(file, "wb", closefd=False, buffering=0) as written:
            left = memoryview(content)
            while left:
                left = left[written.write(left) :]
            socket.send_fds(control, [header], [theirs.fileno(), file], socket.MSG_DONTWAIT)
    except OSError:
        ours.close()
        raise
    finally:
        os.close(file)
    return ours


# --- in the process that forks, and in its children ----------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A piece of work.

    Attributes:
        header: What is to be done.
        socket: To the server.
    """

    header: bytes
    socket: socket.socket
    _file: int

    def content(self) -> bytes:
        """What is in the file."""
        return os.pread(self._file, os.fstat(self._file).st_size, 0)


def prepare() -> None:
    """Give this process a group of its own, children to wait for, and no dumps of memory: for what `start` runs.

    `end` reaches its children by the group, and Ctrl-C none of them. But no session of its own: where Linux groups
    tasks by session (autogroup), sessions share the processors evenly, and niceness counts within one alone.
    """
    os.setpgrp()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a server may have it ignored: then no child can be waited for
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Children:
    """The children of this process, and what they take together: beyond the limit, the largest ends.

    Args:
        most: Bytes that they may take together, beside what each is forked with.
    """

    def __init__(self, most: int = TOGETHER_BYTES) -> None:
        self._most = most
        self._forked_with: dict[int, int] = {}
        self._ending: set[int] = set()
        self._next = 0.0

    def fork(self) -> bool:
        """Fork one; return whether this is it. None is forked where the system has no more processes or memory: whoever
        waits for it finds its socket closed, and those that run go on."""
        try:
            child = os.fork()
        except OSError:
            return False
        if child:
            self._forked_with[child] = _own_bytes(os.getpid())
        return not child

    def watch_until_readable(self, control: socket.socket) -> None:
        """Wait for a message; meanwhile take away children that have ended, and end the largest beyond the limit."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while self._forked_with:
            left = self._next - time.monotonic()
            if left > 0 and poll.poll(left * 1e3):
                return
            self._next = time.monotonic() + WATCH_SECONDS
            self._watch()
        poll.poll()

    def _watch(self) -> None:
        taken: dict[int, int] = {}
        for child, forked_with in list(self._forked_with.items()):
            if os.waitpid(child, os.WNOHANG)[0]:  # until then its id is not another's
                del self._forked_with[child]
                self._ending.discard(child)
            elif child not in self._ending:
                taken[child] = max(0, _own_bytes(child) - forked_with)
        while sum(taken.values()) > self._most:
            largest = max(taken, key=lambda child: taken[child])
            os.kill(largest, signal.SIGKILL)
            self._ending.add(largest)
            del taken[largest]


def pieces(control: socket.socket, children: Children) -> Iterator[Piece]:
    """Yield what is asked, until the server closes `control`. Meanwhile the children are watched."""
    while True:
        children.watch_until_readable(control)
        header, files, _, _ = socket.recv_fds(control, _HEADER_BYTES, 2)
        if not header:
            return
        try:
            with socket.socket(fileno=files[0]) as connection:
                yield Piece(header, connection, files[1])
        finally:
            os.close(files[1])


def limit(seconds: float, memory: int, stack: int) -> None:
    """Limit this process. The system ends it beyond a limit, and first where it is short of memory itself.

    Args:
        seconds: Processor time from now on; `signal.setitimer(signal.ITIMER_PROF, ...)` gives it more.
        memory: Bytes in addition to those that it has.
        stack: Bytes of its stack.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    most = _address_space() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process


def end_when_closed(connection: socket.socket, ends: bool = True) -> None:
    """Have the system end this process when the other end of a socket is closed, whatever it computes; or, not `ends`,
    have it no more.

    Nothing is sent or received meanwhile: that would end it, too.
    """
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    if not ends:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO says that it is closed
    poll = select.poll()
    poll.register(connection, 0)
    if poll.poll(0):  # it was closed before
        os._exit(0)


def _own_bytes(process: int) -> int:
    """Resident bytes of a process that are in no file: 0 for one that has ended. Takes some microseconds."""
    with open(f"/proc/{process}/statm") as file:
        _, resident, of_files, *_ = map(int, file.read().split())
    return (resident - of_files) * resource.getpagesize()


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

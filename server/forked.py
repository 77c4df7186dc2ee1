"""Work that may take too long or too much memory, each piece in a process of its own: whatever becomes of it, the
server goes on.

The processes are forked from one that has imported the libraries. The server starts that one with `start`, and asks it
with `ask`; it reads what is asked with `pieces`, and the child of a piece calls `limit`.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

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
    """Give this process a group of its own, and no dumps of memory: for what `start` runs.

    `end` reaches its children by the group, and Ctrl-C none of them. But no session of its own: where Linux groups
    tasks by session (autogroup), sessions share the processors evenly, and niceness counts within one alone.
    """
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def pieces(control: socket.socket) -> Iterator[Piece]:
    """Yield what is asked, until the server closes `control`. Children of this process are not waited for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes them away when they have ended
    while True:
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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

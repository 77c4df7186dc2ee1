"""Work in processes of its own: what is asked arrives, and a child ends with whoever waits for it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from bigmodel.server import forked


def child(function: Callable[[], None]) -> int:
    """Run a function in a process of its own; returns its number."""
    number = os.fork()
    if not number:
        try:
            function()
        finally:
            os._exit(0)
    return number


def ending(number: int) -> int:
    """The exit code of a child, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def test_pieces_arrive_as_they_are_asked_for_until_the_server_has_ended() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def answer() -> None:
        control.close()
        for piece in forked.pieces(theirs, forked.Children()):
            piece.socket.sendall(piece.header + piece.content())

    process = child(answer)
    theirs.close()
    contents = [b"", b"b" * (1 << 20), b"c"]
    for content in contents:
        with forked.ask(control, b"a", content, socket.SOCK_STREAM) as connection:
            assert b"".join(iter(lambda: connection.recv(1 << 20), b"")) == b"a" + content
    control.close()
    assert ending(process) == 0


def test_the_largest_child_ends_where_all_take_too_much_together() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def work() -> None:
        control.close()
        children = forked.Children(most=32 << 20)
        for piece in forked.pieces(theirs, children):
            if children.fork():
                held = bytearray(os.urandom(1) * int(piece.header))
                piece.socket.sendall(b"+")
                piece.socket.recv(1)
                piece.socket.sendall(bytes(held[:1]))
                os._exit(0)

    process = child(work)
    theirs.close()
    small, large = (forked.ask(control, str(size << 20).encode(), b"", socket.SOCK_STREAM) for size in (8, 64))
    assert small.recv(1) == b"+"
    assert b"".join(iter(lambda: large.recv(1), b"")) in (b"", b"+"), "it ends unasked"
    small.sendall(b"?")
    assert len(small.recv(1)) == 1, "it goes on"
    for each in (small, large, control):
        each.close()
    assert ending(process) == 0


def test_children_are_waited_for_where_the_server_has_theirs_ignored() -> None:
    def work() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # programs that are started inherit it
        forked.prepare()
        ours, theirs = socket.socketpair()
        children = forked.Children()
        if children.fork():
            os._exit(0)
        theirs.close()  # the child has the last one
        while children._forked_with:
            children.watch_until_readable(ours)
        os._exit(7)

    assert ending(child(work)) == 7


def test_who_asks_a_process_that_has_ended_is_told() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with control, pytest.raises(ConnectionError):
        forked.ask(control, b"a", b"", socket.SOCK_STREAM)


@pytest.mark.parametrize("before", [False, True])
def test_a_child_ends_when_its_socket_is_closed(before: bool) -> None:
    ours, theirs = socket.socketpair()
    if before:
        ours.close()

    def work() -> None:
        ours.close()
        forked.end_when_closed(theirs)
        while True:
            time.sleep(1)

    process = child(work)
    theirs.close()
    ours.close()
    assert ending(process) in (0, -signal.SIGIO)


def test_a_child_that_sends_its_answer_is_not_ended_by_it() -> None:
    ours, theirs = socket.socketpair()

    def work() -> None:
        forked.end_when_closed(theirs)
        forked.end_when_closed(theirs, ends=False)
        theirs.sendall(b"a" * (1 << 20))

    process = child(work)
    theirs.close()
    with ours:
        assert len(b"".join(iter(lambda: ours.recv(1 << 16), b""))) == 1 << 20
    assert ending(process) == 0


def test_a_child_ends_at_its_limits() -> None:
    def compute() -> None:
        forked.limit(0.01, 1 << 20, 1 << 20)
        while True:
            pass

    assert ending(child(compute)) == -signal.SIGPROF

    def grow() -> None:
        forked.limit(60, 1 << 20, 1 << 20)
        try:
            bytearray(1 << 33)
        except MemoryError:
            os._exit(7)

    assert ending(child(grow)) == 7

"""Asking the server of `tests/preloaded.py` for a program, and being that program for whoever started this one.

    python -I -S tests/asking.py ADDRESS MODULES ARGUMENTS...

Executables of `write_commands` run this file: it imports little, as shells and agents start it hundreds of times.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def request(
    arguments: Sequence[str], env: Mapping[str, str], modules: Sequence[str] = (), pass_fds: Sequence[int] = ()
) -> dict[str, object]:
    """Return what the server is asked with: for the arguments see `tests.preloaded.Program`."""
    return {
        "arguments": list(arguments),
        "env": dict(env),
        "cwd": os.getcwd(),
        "modules": list(modules),
        "pass_fds": list(pass_fds),
    }


def send(address: str | Path, asked: dict[str, object], descriptors: Sequence[int]) -> None:
    """Ask the server at `address` to start a program: its status, standard streams and other descriptors are given."""
    # A message has a limit of its own, far below that of a file.
    file = os.memfd_create("request")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, open(file, "wb") as content:
        server.connect(str(address))
        content.write(marshal.dumps(asked))
        content.flush()
        socket.send_fds(server, [b"start"], [file, *descriptors])
        server.recv(1)


def ask(address: str, modules: str, *arguments: str) -> None:
    """Have a program run with this process's streams, forward signals to it, and end as it does."""
    if arguments[0] == "-u":  # unbuffered output, on which nothing here depends
        arguments = arguments[1:]
    status, child_status = os.pipe()
    asked = request(arguments, os.environ, modules.split(",") if modules else ())
    send(address, asked, [child_status, 0, 1, 2])
    os.close(child_status)
    with open(status) as told:
        program = int(told.readline())
        with open(os.path.join(os.path.dirname(address), f"{os.getpid()}.program"), "w") as file:
            file.write(str(program))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(program, number))
        code = int(told.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    ask(*sys.argv[1:])

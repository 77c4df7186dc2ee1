"""Python programs that start with PyTorch and this library already imported.

Importing them takes seconds of CPU in every process. A server imports them once for each test process, and forks for
every program that a test starts; the child then runs as `python -m MODULE`, `python -c CODE` or `python SCRIPT` would.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "bigmodel.cli.launch",
    "bigmodel.launch.job",
    "bigmodel.train.accelerator.core",
    "bigmodel.train.strategies.sharded.fsdp",
    "torch.distributed.run",
    "torch.optim.adamw",
    "torch._dynamo",
)
"""What the server imports. None of these modules starts a thread, which a fork would lose."""


class Program:
    """A started program, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: those of the interpreter: ["-m", module, ...], ["-c", code, ...] or [script, ...].
        env: the program's whole environment.
        stdin: whether the program reads from `stdin`; else there is nothing to read.
        modules: imported by the server before it forks, now and for later programs.
    """

    def __init__(
        self, arguments: Sequence[object], env: Mapping[str, str], *, stdin: bool = False, modules: Sequence[str] = ()
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        pipes = [os.pipe() for _ in range(4)]
        (out, child_out), (err, child_err), (child_in, into), (status, child_status) = pipes
        request = {"arguments": self.args, "env": dict(env), "cwd": os.getcwd(), "modules": list(modules)}
        _server().start(request, [child_in, child_out, child_err, child_status])
        for descriptor in (child_in, child_out, child_err, child_status):
            os.close(descriptor)
        self.stdout, self.stderr, self._status = (os.fdopen(each) for each in (out, err, status))
        self.stdin = os.fdopen(into, "w")
        if not stdin:
            self.stdin.close()
        started = self._status.readline()
        assert started, "the server of preloaded programs has died"
        self.pid = int(started)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return everything the program writes, when it has ended. Raises TimeoutExpired."""
        self.stdin.close()
        texts = ["", ""]

        def read(number: int, stream: Any) -> None:
            texts[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=item, daemon=True) for item in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait()
        return texts[0], texts[1]

    def wait(self) -> int:
        """Return the exit code, or minus the number of the signal that ended the program."""
        if self.returncode is None:
            self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has been waited for."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program at once, and wait for it."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        self.wait()


class _Server:
    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "tests.preloaded", str(there.fileno())]
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[there.fileno()])
        self._socket = here
        atexit.register(self._stop)

    def start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        # A message has a limit of its own, far below that of a file.
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._socket, [b"start"], [file.fileno(), *descriptors])
            self._socket.recv(1)

    def _stop(self) -> None:
        self._socket.close()
        self.process.wait()


@cache
def _server() -> _Server:
    return _Server()


def _serve(descriptor: int) -> None:
    """Fork a process for every request, until the other end is closed. In such a process, run its program."""
    _import(MODULES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watchers are not waited for
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 16, 5)
            if not message:
                return
            content, *rest = descriptors
            with os.fdopen(content, "rb") as file:
                file.seek(0)
                request = json.loads(file.read())
            if request["modules"]:
                _import(request["modules"])
            if os.fork() == 0:
                requests.detach()
                os.close(descriptor)
                break
            requests.send(b".")
            for each in rest:
                os.close(each)
    if _watched(rest.pop()):
        _end(_exit_code(request, rest))


def _import(names: Sequence[str]) -> None:
    """Import modules, and exempt the objects that exist now from the programs' garbage collections."""
    for name in names:
        import_module(name)
    gc.collect()
    gc.freeze()


def _watched(status: int) -> bool:
    """Fork once more, and return True in the child. The parent reports the child's number and end to `status`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(status)
        return True
    os.write(status, f"{child}\n".encode())
    for descriptor in (0, 1, 2):
        os.close(descriptor)  # otherwise readers of the program's output would wait for this process
    os.closerange(3, status)
    os.closerange(status + 1, 256)
    _, code = os.waitpid(child, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
    os._exit(0)


def _exit_code(request: dict[str, Any], streams: list[int]) -> int:
    try:
        _run(request, streams)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.last_type, error, trace = sys.exc_info()
        sys.excepthook(sys.last_type, error, trace and trace.tb_next and trace.tb_next.tb_next)  # type: ignore[arg-type]
        return 1
    return 0


def _end(code: int) -> None:
    """End as Python does, but without tearing down modules, which some report as an error."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(request: dict[str, Any], streams: list[int]) -> None:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The server's stream objects refer to its own files.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    kind, *rest = request["arguments"]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        source, name = rest[0], "<string>"
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = str(Path(kind).resolve().parent)
        source, name = Path(kind).read_text(), kind
        main.__file__ = kind
    exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
    _end(0)

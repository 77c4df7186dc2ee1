"""Python programs that start with PyTorch and this library already imported.

Importing them takes seconds of CPU in every process. A server, which all processes of a test run share, imports them
once, and forks for every program that a test starts; the child then runs as `python -m MODULE`, `python -c CODE` or
`python SCRIPT` would. Programs that need something done before those imports have a server of their own, which does it.

Tests start programs with `Program` and `run`. `write_commands` makes executables `python` and `bigmodel` for shells:
each is `tests/asking.py`, run without site-packages, which asks the server and waits for the program.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import inspect
import marshal
import os
import runpy
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from tests.asking import request, send

ROOT = Path(__file__).resolve().parents[1]
ASKING = ROOT / "tests" / "asking.py"
MODULES = (
    "bigmodel.cli.launch",
    "bigmodel.launch.job",
    "bigmodel.train.accelerator.core",
    "bigmodel.train.strategies.sharded.fsdp",
    "torch.distributed.run",
    "torch.optim.adamw",
    "torch._dynamo",
    "pydantic.fields",
)
"""What the server imports. None of these modules starts a thread, which a fork would lose."""
NVML = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""What `bigmodel.devices` adds to the environment of the process that imports it: a forked one has imported it."""
COLLECTED = "tests.collected"
STREAMS = 3
"""Standard input, output and error of a program."""


class Program:
    """A started program, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: those of the interpreter: ["-m", module, ...], ["-c", code, ...] or [script, ...].
        env: the program's whole environment.
        stdin: whether the program reads from `stdin`; else there is nothing to read.
        stdout: descriptor that the program writes to; None: a pipe, read as `stdout`.
        stderr: likewise.
        modules: imported by the server before it forks, now and for later programs.
        pass_fds: descriptors that the program has under the same numbers.
        prelude: module that is imported before any other: programs with the same one have a server of their own.
            `COLLECTED` is imported after the others, by a server that is itself a program.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str],
        *,
        stdin: bool = False,
        stdout: int | None = None,
        stderr: int | None = None,
        modules: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        prelude: str = "",
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        (child_in, into), (status, child_status) = os.pipe(), os.pipe()
        self.stdout, child_out = _reader(stdout)
        self.stderr, child_err = _reader(stderr)
        _server(prelude).start(
            request(self.args, env, modules, pass_fds), [child_status, child_in, child_out, child_err, *pass_fds]
        )
        for descriptor in (child_in, child_out, child_err, child_status):
            os.close(descriptor)
        self._status = os.fdopen(status, "rb", buffering=0)  # `wait` asks whether there is more to read
        self.stdin = os.fdopen(into, "w")
        if not stdin:
            self.stdin.close()
        started = self._status.readline()
        assert started, "the server of preloaded programs has died"
        self.pid = int(started)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Send `input`, and return everything the program writes, when it has ended. Raises TimeoutExpired."""
        if input:
            self.stdin.write(input)
        self.stdin.close()
        texts = ["", ""]

        def read(number: int, stream: IO[str] | None) -> None:
            texts[number] = stream.read() if stream is not None else ""

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

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the number of the signal that ended the program. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.readline())
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code as `wait` does; None if the program has not ended."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has been waited for."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the program to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the program at once, and wait for it."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        self.wait()


def run(
    arguments: Sequence[object],
    env: Mapping[str, str] | None = None,
    *,
    input: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    modules: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    prelude: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` would, and return what it wrote."""
    given = os.environ if env is None else env
    has_input = input is not None
    program = Program(arguments, given, stdin=has_input, modules=modules, pass_fds=pass_fds, prelude=prelude)
    try:
        out, err = program.communicate(input, timeout)
    finally:
        program.kill()
    assert program.returncode is not None
    done = subprocess.CompletedProcess(program.args, program.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def write_commands(folder: Path, modules: Sequence[str] = (), prelude: str = "") -> None:
    """Write the executables `python` and `bigmodel` to `folder`: a shell that has it in PATH runs preloaded programs.

    Args:
        folder: is made if it does not exist.
        modules: as for `Program`.
        prelude: likewise.
    """
    address = _server(prelude).address
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in {"python": [], "bigmodel": ["-m", "bigmodel.cli.main"]}.items():
        options = shlex.join([str(ASKING), str(address), ",".join(modules), *arguments])
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {options} "$@"\n')
        (folder / name).chmod(0o755)


@cache
def python_executable(*modules: str, prelude: str = "") -> Path:
    """Return the executable `python` of `write_commands`, for programs that start others, as torch's agent does."""
    folder = _server(prelude).folder / f"commands-{os.getpid()}-{hashlib.sha256(repr(modules).encode()).hexdigest()}"
    write_commands(folder, modules, prelude)
    return folder / "python"


def program_of(asking: int) -> int:
    """Return the number of the program that an executable of `python_executable` waits for, by the executable's own."""
    return int((_server().folder / f"{asking}.program").read_text())


def _reader(given: int | None) -> tuple[IO[str] | None, int]:
    """Return what reads the program's output, and the descriptor that the program writes to; with `given` only the
    latter, a duplicate."""
    if given is not None:
        return None, os.dup(given)
    ours, theirs = os.pipe()
    return os.fdopen(ours), theirs


class _Server:
    """A process that forks: started by the first process of a test run that needs it, and shared with the others.

    It ends when the last of them does: each holds the pipe `users` open.

    Attributes:
        folder: of the socket that takes requests, of the pipe and of what tests write beside them.
        address: of the socket, for shells too.
    """

    def __init__(self, prelude: str) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", secrets.token_hex())[:16]
        self.folder = Path(tempfile.gettempdir()) / f"bigmodel-{prelude.rpartition('.')[2] or 'plain'}-{run}"
        self.address = self.folder / "requests"
        with _locked():
            if not self.address.exists():
                self._start(prelude)
            self._users = os.open(self.folder / "users", os.O_WRONLY | os.O_NONBLOCK)

    def _start(self, prelude: str) -> None:
        self.folder.mkdir(exist_ok=True)
        os.mkfifo(self.folder / "users")
        users = os.open(self.folder / "users", os.O_RDONLY | os.O_NONBLOCK)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.address))
            listener.listen(128)
            hidden = ("BIGMODEL_VIRTUAL",)
            inherited = {name: value for name, value in os.environ.items() if name not in hidden}
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**inherited, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
            descriptors = [listener.fileno(), users]
            given = [*map(str, descriptors), str(self.folder), prelude]
            command = ["-m", "tests.preloaded", "--serve", *given]
            if prelude == COLLECTED:
                self._program = Program(command, environment, stdout=1, stderr=2, pass_fds=descriptors)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, *command], env=environment, cwd=ROOT, pass_fds=descriptors
                )
        os.close(users)

    def start(self, asked: dict[str, object], descriptors: list[int]) -> None:
        send(self.address, asked, descriptors)


@contextmanager
def _locked() -> Iterator[None]:
    """Hold the lock under which servers begin and end."""
    with (Path(tempfile.gettempdir()) / f"bigmodel-preloaded-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _server(prelude: str = "") -> _Server:
    return _Server(prelude)


def _serve(listening: int, users: int, folder: Path, prelude: str) -> None:
    """Fork a process for every request, until nobody holds the other end of `users`. In such a process, run its
    program."""
    if prelude:
        import_module(prelude)
    _import(MODULES)
    works = _forked_programs_work()
    running: dict[int, tuple[int, int]] = {}  # by handle: the number of a program, and the pipe that its end is told to
    with socket.socket(fileno=listening) as listener:
        while True:
            ready = select.select([listener, users, *running], [], [])[0]
            for handle in running.keys() & {*ready}:
                _report(*running.pop(handle))
                os.close(handle)
            if users in ready:
                with _locked():
                    if _is_abandoned(users):
                        shutil.rmtree(folder)
                        return
            if listener not in ready:
                continue
            connection, _ = listener.accept()
            with connection:
                _, (content, *rest), _, _ = socket.recv_fds(connection, 16, 32)
                with os.fdopen(content, "rb") as file:
                    file.seek(0)
                    request = marshal.loads(file.read())
                if request["modules"]:
                    _import(request["modules"])
                    works = works and _forked_programs_work()
                status, *descriptors = rest
                program = os.fork()
                if program == 0:
                    break
                os.write(status, f"{program}\n".encode())
                running[os.pidfd_open(program)] = program, status
                connection.send(b".")
            for each in descriptors:
                os.close(each)
    for each in (users, status, *running, *(pipe for _, pipe in running.values())):
        os.close(each)
    if not works:
        _start_afresh(request, descriptors, prelude)
    _end(_exit_code(request, descriptors))


def _forked_programs_work() -> bool:
    """Return whether a fork of this process can use CUDA where it is there: not if an import has asked its driver.

    Optimizers ask CUDA also for weights of the host.
    """
    import torch

    if not torch.cuda.is_available():
        return True
    process = os.fork()
    if process == 0:
        try:
            torch.zeros(1, device="cuda")
        except Exception:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


def _start_afresh(request: dict[str, Any], descriptors: list[int], prelude: str) -> None:
    """Run the program of a request in a new interpreter, in the place of this process."""
    _place(request, descriptors)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, "--afresh", prelude, *request["arguments"]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


def _is_abandoned(users: int) -> bool:
    """Return whether nobody holds the other end of the pipe."""
    with suppress(BlockingIOError):
        return os.read(users, 1) == b""
    return False


def _import(names: Sequence[str]) -> None:
    """Import modules, and exempt the objects that exist now from the programs' garbage collections.

    What cannot be imported fails in the program that imports it, and not in the server, which others use.
    """
    with _silenced():
        for name in names:
            with suppress(ImportError):
                import_module(name)
    # At their end programs would take thousands of kernels out of PyTorch's tables, one by one.
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        if each.peek()[1].__module__ == "torch.library":
            each.atexit = False
    gc.collect()
    gc.freeze()


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop what is written to standard error: libraries' notices about themselves would stand beside the tests'."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _report(program: int, status: int) -> None:
    """Write how a program has ended to the pipe that its starter reads."""
    _, code = os.waitpid(program, 0)
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
    os.close(status)


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


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    from bigmodel.devices import virtual

    _place(request, descriptors)
    # The server's stream objects refer to its own files.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    tempfile.tempdir = None  # that of the environment, as in a new interpreter
    virtual.enable_from_environment()
    # Torch's launcher looks at stacks, for which Python would go over all modules again and again: no module has this
    # file.
    inspect.modulesbyfile[inspect.getabsfile(runpy.run_module, "<frozen runpy>")] = "runpy"  # type: ignore[attr-defined]
    _run_main(request["arguments"])


def _place(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the streams, the environment and the working directory of a program."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 256) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip([*range(STREAMS), *request["pass_fds"]], high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.setdefault(*NVML)
    os.chdir(request["cwd"])


def _run_main(arguments: Sequence[str]) -> None:
    """Run a program as the interpreter with these arguments would."""
    sys.path[0] = os.getcwd()
    kind, *rest = arguments
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
    if sys.argv[1] == "--afresh":
        if sys.argv[2]:
            import_module(sys.argv[2])
        _run_main(sys.argv[3:])
        sys.exit()
    _serve(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    _end(0)

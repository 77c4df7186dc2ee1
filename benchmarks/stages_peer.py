"""accelerate's `prepare_pippy` as the peer of the forwards of `benchmarks stages`.

It splits a model over processes on a schedule of torch.distributed.pipelining, `ScheduleGPipe`, and hands on hidden
states by gloo. Each process (`stages_peer_stage`) computes one stage of the same model on the host, held to the speed
of the virtual accelerators by their own clock, so that schedules are compared and not kernels. The processes run
throughout and wait for their turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from .harness import BenchmarkError
from .harness.isolate import environment_of_children
from .nodes import free_port

if TYPE_CHECKING:
    import torch

PACKAGE = "accelerate"
NAME = "accelerate, prepare_pippy"
DONE = "done"
"""Answer to a forward."""


class Peer:
    """The processes of a model in stages, which have started or are about to.

    Args:
        processes: One for each stage, in order. All read lines; the last one answers.
        log: What they write to standard error.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[str]], log: IO[str]) -> None:
        self._processes = processes
        self._log = log

    def forward(self, rows: int) -> None:
        """Compute the batch of so many rows; returns when the last stage has its logits.

        Raises:
            BenchmarkError: A process has ended.
        """
        self._ask(f"forward {rows}")

    def logits(self) -> torch.Tensor:
        """Return the logits of the last forward.

        Raises:
            BenchmarkError: A process has ended.
        """
        import torch

        return torch.tensor(self._ask("logits"))

    def _ask(self, line: str) -> Any:
        try:
            for process in self._processes:
                assert process.stdin is not None
                print(line, file=process.stdin, flush=True)
            answers = self._processes[-1].stdout
            assert answers is not None
            return json.loads(answers.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise self._ended() from error

    def _ended(self) -> BenchmarkError:
        """Return the error of a process that has ended, with what all have written."""
        self._log.seek(0)
        return BenchmarkError(f"a stage of {NAME!r} has ended:\n{self._log.read().strip()}")


@contextmanager
def stages_of_accelerate(
    count: int, rows: Sequence[int], layers: int, width: int, inner: int, flops: float
) -> Iterator[Peer]:
    """Start the processes of so many stages; they end with the context.

    Args:
        count: Number of stages.
        rows: Rows of each batch that they will compute; each row is a micro-batch.
        layers: Of the model.
        width: Of its hidden states.
        inner: Of its feed-forward layers.
        flops: Multiplications and additions per second of each stage.
    """
    shared = {**environment_of_children(), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count)}
    shared |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [*map(str, (layers, width, inner)), repr(flops), *map(str, rows)]
    command = [sys.executable, "-m", f"{__package__}.stages_peer_stage", *arguments]
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            for rank in range(count):
                env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                answers = subprocess.PIPE if rank == count - 1 else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answers, stderr=log, env=env, text=True)
                )
            yield Peer(processes, log)
        finally:
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()

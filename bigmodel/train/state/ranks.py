"""Operations that depend on the rank: run by some processes only, run in order, or applied to each process's share."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from bigmodel.errors import TrainError
from bigmodel.train.nested import map_members


def share_bounds(length: int, num_processes: int, process_index: int) -> tuple[int, int]:
    """Return (start, end) of a process's share: contiguous, sizes differing by at most one, larger ones first."""
    size, extra = divmod(length, num_processes)
    start = process_index * size + min(process_index, extra)
    return start, start + size + (process_index < extra)


def process_share(inputs: Any, num_processes: int, process_index: int, apply_padding: bool = False) -> Any:
    """Return a process's share of a list, tuple, tensor, mapping of such of one length, or `datasets.Dataset`.

    With `apply_padding`, shares are filled up to one length with the last element of `inputs`.

    Raises:
        TrainError: a dict whose values differ in length, or padding of a collection of another type.
    """
    if num_processes == 1:
        return inputs
    length = _length(inputs)
    start, end = share_bounds(length, num_processes, process_index)
    missing = -(-length // num_processes) - (end - start) if apply_padding else 0
    return _take(inputs, start, end, missing)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {name: len(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise TrainError(f"the values of a dict split between processes must have one length, not {lengths}")
    return next(iter(lengths.values()), 0)


def _take(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, Mapping):
        return map_members(lambda value: _take(value, start, end, missing), inputs)
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:end]
        return torch.cat([part, *[inputs[-1:]] * missing]) if missing else part
    if isinstance(inputs, (list, tuple)):
        return type(inputs)([*inputs[start:end], *list(inputs[-1:]) * missing])
    if hasattr(inputs, "select"):
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    if missing:
        raise TrainError(f"apply_padding does not know how to repeat elements of a {type(inputs).__name__}")
    return inputs[start:end]


F = TypeVar("F", bound=Callable[..., Any])


class RankOperations:
    """Operations that depend on `num_processes`, `process_index` and `local_process_index`."""

    num_processes: int
    process_index: int
    local_process_index: int

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        raise NotImplementedError

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of the run."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.process_index == self.num_processes - 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each machine only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on the main process, then on the others."""
        yield from self._goes_first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the body on the main process of each machine, then on the others of that machine."""
        yield from self._goes_first(self.is_local_main_process)

    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's share of `inputs` (list, tuple, dict of such, tensor or datasets' Dataset).

        Shares differ by at most one element, the first processes having the larger; with `apply_padding` the last
        element is repeated so that all have the same length.
        """
        yield process_share(inputs, self.num_processes, self.process_index, apply_padding)

    def on_main_process(self, function: F | None = None) -> F | Callable[[F], F]:
        """Decorate a function so that only the main process runs it; on others it returns None."""
        return self._only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F | None = None) -> F | Callable[[F], F]:
        """Decorate a function so that only the main process of each machine runs it."""
        return self._only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F | None = None) -> F | Callable[[F], F]:
        """Decorate a function so that only the last process runs it."""
        return self._only_if(lambda: self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> F | Callable[[F], F]:
        """Decorate a function so that only process number `process_index` runs it."""
        if process_index is None:
            raise TrainError("on_process needs process_index, the rank of the process that runs the function")
        return self._only_if(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: F | None = None, local_process_index: int | None = None
    ) -> F | Callable[[F], F]:
        """Decorate a function so that only process number `local_process_index` of each machine runs it."""
        if local_process_index is None:
            raise TrainError("on_local_process needs local_process_index, the rank of the process on its machine")
        return self._only_if(lambda: self.local_process_index == local_process_index, function)

    def _only_if(self, condition: Callable[[], bool], function: F | None) -> F | Callable[[F], F]:
        if function is None:
            return partial(self._only_if, condition)  # type: ignore[return-value]

        @wraps(function)
        def run_if(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if condition() else None

        return run_if

"""The parts of accelerate's pipeline inference, for callers that put them together themselves.

`prepare_pippy` (`inference`) traces nothing and uses none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import TrainError
from ..plan import infer_auto_device_map
from ..train.collectives import pad_input_tensors
from ..train.nested import find_batch_size
from ..train.state.partial import PartialState
from .classes import copy_tensor_to_devices
from .inference import balanced_split_points


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Collection[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
) -> dict[str, Any]:
    """Return the process, by number, that runs each part of `model`; without `max_memory` all hold nearly the same.

    In one process it is the map of `infer_auto_device_map`.
    """
    if num_processes == 1 or max_memory is not None:
        classes = None if no_split_module_classes is None else list(no_split_module_classes)
        limits = None if max_memory is None else dict(max_memory)
        return infer_auto_device_map(model, limits, no_split_module_classes=classes, clean_result=False)
    begins = balanced_split_points(model, num_processes, no_split_module_classes)
    placed: dict[str, Any] = {}
    stage = 0
    for name in _leaves(model, "", begins, frozenset(no_split_module_classes or ())):
        if stage < len(begins) and f"{name}.".startswith(f"{begins[stage]}."):
            stage += 1
        placed[name] = stage
    return placed


def find_pippy_batch_size(args: Iterable[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the rows of the first tensor among the arguments of a call; None if there is none."""
    for value in (*(args or ()), *(kwargs or {}).values()):
        found = find_batch_size(value)
        if found is not None:
            return found
    return None


def build_pipeline(
    model: nn.Module, split_points: Iterable[str], args: Any, kwargs: Mapping[str, Any] | None, num_chunks: int
) -> Any:
    """Return the schedule of `torch.distributed.pipelining` by which this process runs its stage of `model`.

    Args:
        split_points: Names of the modules that the second and each further stage begins with.
        args: Positional arguments of one micro-batch; the model is traced with them.
        kwargs: Keyword arguments, likewise.
        num_chunks: Micro-batches of a batch.
    """
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    state = PartialState()
    begins = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=args, mb_kwargs=dict(kwargs or {}), split_spec=begins)
    return ScheduleGPipe(pipe.build_stage(state.local_process_index, device=state.device), num_chunks)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a batch through the stages: the first process gives it to `forward`, the last one has the output.

    Args:
        forward: The ``step`` of a schedule.
        num_chunks: Rows that a batch is filled up to.
        gather_output: Return the output on every process.

    Raises:
        TrainError: There is no tensor among the arguments.
    """
    state = PartialState()
    output = None
    if state.num_processes == 1:
        output = forward(*args, **kwargs)
    elif state.is_local_main_process:
        rows = find_pippy_batch_size(args, kwargs)
        if rows is None:
            raise TrainError("no argument of the call is a tensor, so that the batch has no number of rows")
        if rows != num_chunks:
            args, kwargs = (pad_input_tensors(data, rows, num_chunks) for data in (args, kwargs))
        forward(*args, **kwargs)
    elif state.is_last_process:
        output = forward()
    else:
        forward()
    return copy_tensor_to_devices(output) if gather_output else output


def _leaves(module: nn.Module, name: str, begins: Iterable[str], whole: Collection[str]) -> Iterable[str]:
    """Yield names of modules that cover `module`: each as large as it is neither split nor holds a beginning."""
    inside = any(point.startswith(f"{name}.") or not name for point in begins)
    if name and (not inside or type(module).__name__ in whole):
        yield name
        return
    for key, _ in module.named_parameters(recurse=False):
        yield f"{name}.{key}" if name else key
    for key, child in module.named_children():
        yield from _leaves(child, f"{name}.{key}" if name else key, begins, whole)

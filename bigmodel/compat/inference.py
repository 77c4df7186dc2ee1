"""Inference of one model by several processes (`prepare_pippy`): each runs one stage of its layers.

The model is traced once with example inputs and cut by ``torch.distributed.pipelining``. A batch goes through the
stages in micro-batches of as many rows as the example has, so that all stages compute at the same time. The first
process reads the batch, the last one has the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..devices.nested import iter_tensors
from ..errors import TrainError
from ..profile import find_no_split_classes
from ..train.collectives import broadcast_object_list
from ..train.nested import find_batch_size, recursively_apply, send_to_device
from ..train.state.partial import PartialState

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Collection[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Cut `model` into as many stages as there are processes, for inference, and return it.

    Call it on every process. Then calls of the model take a batch of any size on the first process, whatever the others
    are given, and return the output on the last, None on the others. In one process the model stays as it is.

    Args:
        model: A model that ``torch.export`` can trace.
        split_points: Names of the modules that the second and each further stage begins with; ``"auto"`` has all stages
            hold nearly the same bytes.
        no_split_module_classes: Classes whose modules ``"auto"`` does not cut; None detects them.
        example_args: Positional arguments to trace the model with: one micro-batch.
        example_kwargs: Keyword arguments; calls must give the same ones.
        num_chunks: Accepted for compatibility: micro-batches have as many rows as the example.
        gather_output: Return the output on every process.

    Raises:
        TrainError: There are fewer parts than processes, `split_points` has another length than the stages need, or the
            last stage does not compute all that the model returns.
    """
    state = PartialState()
    stages = state.num_processes
    if isinstance(split_points, str):
        split_points = balanced_split_points(model, stages, no_split_module_classes)
    if len(split_points) != stages - 1:
        raise TrainError(
            f"split_points has {len(split_points)} names, but {stages} processes run {stages} stages: give {stages - 1}"
        )
    model.hf_split_points = list(split_points)  # type: ignore[assignment]
    if stages == 1:
        return model
    example: Inputs = (tuple(send_to_device(example_args, "cpu")), send_to_device(dict(example_kwargs or {}), "cpu"))
    pipelined = PipelinedForward(model, split_points, example, gather_output)
    model._original_forward = model.forward  # type: ignore[assignment]
    model.pippy_stage = pipelined.stage  # type: ignore[assignment]
    model.forward = pipelined
    return model


def balanced_split_points(model: nn.Module, stages: int, no_split_classes: Collection[str] | None = None) -> list[str]:
    """Return the module that each stage but the first begins with, such that all hold nearly the same bytes.

    Args:
        no_split_classes: Classes whose modules stay in one stage; None detects them.

    Raises:
        TrainError: The model has fewer parts than stages.
    """
    classes = find_no_split_classes(model) if no_split_classes is None else no_split_classes
    parts = list(_parts(model, "", frozenset(classes)))
    if len(parts) < stages:
        raise TrainError(
            f"{type(model).__name__} has {len(parts)} parts that hold weights: {stages} stages need as many"
        )
    seen: set[int] = set()
    before = [0]
    for _, part in parts:
        own = [parameter for parameter in part.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        before.append(before[-1] + sum(parameter.nbytes for parameter in own))
    chosen: list[int] = []
    for stage in range(1, stages):
        lowest, highest = (chosen[-1] if chosen else 0) + 1, len(parts) - (stages - stage)
        share = before[-1] * stage / stages
        chosen.append(min(range(lowest, highest + 1), key=lambda index: abs(before[index] - share)))
    return [parts[index][0] for index in chosen]


def _parts(module: nn.Module, name: str, whole: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold weights and are not cut, in the order of the model."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if type(child).__name__ in whole or child._parameters or next(child.children(), None) is None:
            if next(child.parameters(), None) is not None:
                yield path, child
        else:
            yield from _parts(child, path, whole)


class PipelinedForward:
    """Replaces a model's forward: runs this process's stage of it.

    Args:
        model: The model.
        split_points: What each stage but the first begins with.
        example: One micro-batch, on the host.
        gather_output: Whether every process returns the output.
    """

    def __init__(self, model: nn.Module, split_points: Sequence[str], example: Inputs, gather_output: bool) -> None:
        from torch.distributed.pipelining import SplitPoint, pipeline

        self._state = PartialState()
        args, kwargs = example
        self._output = _Output(model)
        begins = {f"{_Output.PREFIX}.{name}": SplitPoint.BEGINNING for name in split_points}
        cut = pipeline(self._output, mb_args=args, mb_kwargs=kwargs, split_spec=begins)
        self._output.check(cut.get_stage_module(cut.num_stages - 1))
        self.stage = cut.build_stage(self._state.process_index, device=self._state.device)
        self._shapes = _shapes(example)
        self._rows = find_batch_size(example) or 1
        self._gather = gather_output
        self._schedules: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        rows, problem = broadcast_object_list([self._check((args, kwargs)) if state.is_main_process else None])[0]
        if problem is not None:
            raise TrainError(problem)
        count = -(-rows // self._rows)
        step = self._step(count)
        if state.is_main_process:
            fill = count * self._rows - rows
            args, kwargs = recursively_apply(lambda tensor: _filled(tensor, rows, fill), (args, kwargs))
            output = step(*send_to_device(args, state.device), **send_to_device(kwargs, state.device))
        else:
            output = step()
        if state.is_last_process:
            tensors = [output] if isinstance(output, torch.Tensor) else output
            output = self._output.restored([_trimmed(tensor, count * self._rows, rows) for tensor in tensors])
        if self._gather:
            output = broadcast_object_list([output], from_process=state.num_processes - 1)[0]
            output = send_to_device(output, state.device)
        return output

    def _check(self, inputs: Inputs) -> tuple[int, str | None]:
        """Return the rows of a batch, and what is wrong with it."""
        shapes = _shapes(inputs)
        if shapes != self._shapes:
            return 0, f"the stages were traced with rows of inputs of shapes {self._shapes}, not {shapes}"
        return find_batch_size(inputs) or 1, None

    def _step(self, count: int) -> Callable[..., Any]:
        """Return what takes a batch of `count` micro-batches through the stages."""
        from torch.distributed.pipelining import ScheduleGPipe

        if count not in self._schedules:
            self._schedules[count] = ScheduleGPipe(self.stage, count).step
        return self._schedules[count]


class _Rest:
    """All of an output but its tensors. An object of its own: tracing puts back what it finds in a module's containers.

    Attributes:
        others: None for each tensor, a tuple of itself for any other leaf.
        spec: The structure.
    """

    others: list[Any]
    spec: TreeSpec


class _Output(nn.Module):
    """A model that returns the tensors in its output alone, as stages do; restores the output from them.

    Args:
        model: The model.
    """

    PREFIX = "model"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._rest = _Rest()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Compute the output, and remember all of it that is no tensor."""
        leaves, spec = tree_flatten(self.model(*args, **kwargs))
        self._rest.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        self._rest.spec = spec
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def check(self, last: nn.Module) -> None:
        """Raise TrainError if the traced module `last` does not return all tensors of the output."""
        node = next(node for node in reversed(last.graph.nodes) if node.op == "output")  # type: ignore
        present = len([leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node)])
        others = self._rest.others
        if present != others.count(None):
            raise TrainError(
                f"{type(self.model).__name__} returns {others.count(None)} tensors, of which the last stage computes "
                f"{present}: have it return no inputs and nothing of earlier layers, such as a cache (use_cache=False)"
            )

    def restored(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the output that has these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if other is None else other[0] for other in self._rest.others]
        return tree_unflatten(leaves, self._rest.spec)


def _shapes(inputs: Inputs) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in iter_tensors(inputs)]


def _filled(tensor: torch.Tensor, rows: int, fill: int) -> torch.Tensor:
    """Return a tensor of `rows` rows with its last one repeated `fill` times more; any other one as it is."""
    if not fill or tensor.ndim == 0 or tensor.shape[0] != rows:
        return tensor
    return torch.cat([tensor, *[tensor[-1:]] * fill])


def _trimmed(tensor: torch.Tensor, filled: int, rows: int) -> torch.Tensor:
    """Return the first `rows` rows of a tensor of `filled` rows; any other one as it is."""
    return tensor[:rows] if tensor.ndim and tensor.shape[0] == filled else tensor

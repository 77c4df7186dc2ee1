"""One stage of a model: what `prepare_pippy` puts in the place of the model's forward.

Each process runs the model's own forward on every micro-batch. Parts of earlier stages are passed over, for the shapes
of what they return. Where the first part of its own is called, the process receives that call's tensors; where the
first part of a later one is, it sends them and leaves the forward. Code between parts runs on every process, so nothing
is traced and inputs may have any shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from ..devices.rows import cut_rows, join_rows
from ..errors import TrainError
from ..train.collectives import broadcast_object_list
from ..train.nested import find_batch_size, send_to_device
from ..train.state.partial import PartialState
from .awaited import Awaited, weights_awaited, with_values


class StagePart(NamedTuple):
    """A module that one stage runs.

    Attributes:
        name: Its name in the model.
        module: The module.
        stage: The number of its stage.
    """

    name: str
    module: nn.Module
    stage: int


class _HandedOn(BaseException):
    """Leaves a forward whose rest later stages compute. No error, so that no model handles it as one."""


class StagedForward:
    """Replaces a model's forward: runs this process's stage of it.

    Args:
        model: The model.
        parts: Its parts that hold weights, in their order.
        rows: Rows of a micro-batch; None: a batch has `chunks` micro-batches.
        chunks: Their number, if `rows` is None.
        gather_output: Whether every process returns the output.
        names: Names of the arguments of a call that has as many, all positional; none: those of the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[StagePart],
        rows: int | None,
        chunks: int,
        gather_output: bool,
        names: Sequence[str] = (),
    ) -> None:
        self._state = PartialState()
        self._model = model
        self._forward = model.forward
        self._rows, self._chunks, self._gather = rows, chunks, gather_output
        self._names = names
        self._received = False
        _place(model, [part.module for part in parts if part.stage != self._rank], self._state.device)
        for part in parts:
            forward = part.module.forward
            staged = update_wrapper(partial(self._call, part, forward), forward)
            part.module.forward = staged

    @property
    def _rank(self) -> int:
        return self._state.process_index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        if args and not kwargs and len(args) == len(self._names):
            args, kwargs = (), dict(zip(self._names, args))
        inputs = send_to_device((args, kwargs), "cpu") if state.is_main_process else None
        inputs = send_to_device(broadcast_object_list([inputs])[0], state.device)
        total = find_batch_size(inputs)
        rows = self._rows or -(-(total or 1) // self._chunks)
        outputs = []
        with torch.no_grad():
            for start in range(0, total or 1, rows):
                part = inputs if total is None else cut_rows(inputs, total, start, start + rows)
                outputs.append(self._micro_batch(*part))
        counts = [min(rows, (total or 1) - start) for start in range(0, total or 1, rows)]
        output = join_rows(outputs, counts, _refusal) if state.is_last_process else None
        if self._gather:
            output = broadcast_object_list([output], from_process=state.num_processes - 1)[0]
            output = send_to_device(output, state.device)
        return output

    def _micro_batch(self, args: Any, kwargs: Any) -> Any:
        """Return the output on the last process, None on the others."""
        self._received = self._state.is_main_process
        try:
            output = self._forward(*args, **kwargs)
        except _HandedOn:
            return None
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not self._received:
                self._receive()  # the process before this one waits until its tensors are taken
            raise self._error("looks, between its parts, at values", f" ({error})") from error
        if not self._state.is_last_process:
            raise TrainError(f"{type(self._model).__name__} calls no part of a stage after {self._rank}")
        known, output = with_values(output)
        if not known:
            raise self._error("returns tensors")
        return output

    def _call(self, part: StagePart, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Called in the place of a part's forward."""
        if part.stage < self._rank:
            if not self._received:
                with weights_awaited(part.module, self._state.device):
                    return forward(*args, **kwargs)
            part.module.to(self._state.device)  # shared by stages
        elif not self._received:
            for leaf, tensor in zip(_tensors((args, kwargs)), self._receive(), strict=True):
                if isinstance(leaf, Awaited):
                    leaf.value = tensor
        known, (args, kwargs) = with_values((args, kwargs))
        if not known:
            raise self._error(f"gives {part.name} tensors")
        if part.stage > self._rank:
            _send((args, kwargs), self._rank + 1)
            raise _HandedOn
        return forward(*args, **kwargs)

    def _receive(self) -> list[torch.Tensor]:
        """Receive what the stage before calls this one with, at the same place of its forward."""
        self._received = True
        return _received(self._rank - 1, self._state.device)

    def _error(self, what: str, how: str = "") -> TrainError:
        return TrainError(
            f"{type(self._model).__name__} {what} that a stage before {self._rank} computes and does not hand on{how}: "
            "choose other split_points, and ask for no outputs of single layers"
        )


def _place(model: nn.Module, elsewhere: Iterable[nn.Module], device: torch.device) -> None:
    """Move a model to the device, all but the modules of other stages."""
    away = {id(module) for each in elsewhere for module in each.modules()}
    for module in model.modules():
        if id(module) in away:
            continue
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _refusal(what: str) -> TrainError:
    return TrainError(
        f"the model returns {what} that has no row for each row of its input, such as a loss: give an example of as "
        "many rows as the batch, so that it is computed in one piece"
    )


def _tensors(data: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def _send(data: Any, rank: int) -> None:
    """Send the tensors in `data` to a process."""
    tensors = _tensors(data)
    dist.send_object_list([[(tuple(tensor.shape), tensor.dtype) for tensor in tensors]], dst=rank)
    for tensor in tensors:
        if tensor.numel():
            # As bytes: gloo does not know every dtype.
            dist.send(tensor.detach().contiguous().view(-1).view(torch.uint8), dst=rank)


def _received(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Receive the tensors that a process sends."""
    sent: list[Any] = [None]
    dist.recv_object_list(sent, src=rank)
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sent[0]]
    for tensor in tensors:
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), src=rank)
    return tensors

"""Inference of one model by several processes (`prepare_pippy`): each runs one stage of its layers.

A batch goes through the stages in micro-batches, so that all stages compute at the same time. The first process reads
the batch, the last one has the output. How a process runs its stage is in `stages`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

from ..dispatch.attach.dispatched import dispatched
from ..errors import TrainError
from ..profile import find_no_split_classes
from ..train.nested import find_batch_size
from ..train.state.partial import PartialState
from .local_stages import compute_in_micro_batches
from .stages import StagedForward, StagePart


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
    are given, and return the output on the last, None on the others.

    In one process a dispatched model whose parts are all resident on several accelerators has its stages there: its
    calls stay as they are, and batches go through the stages in micro-batches. Any other model stays as it is.

    Models of transformers are set to return no cache (``use_cache``), since no process has all of it.

    Args:
        model: A model whose code between its layers does not depend on what they compute.
        split_points: Names of the modules that the second and each further stage begins with; ``"auto"`` has all stages
            hold nearly the same bytes, or begin where the model is dispatched to.
        no_split_module_classes: Classes whose modules ``"auto"`` does not cut; None detects them.
        example_args: Positional arguments of one call: a micro-batch has as many rows.
        example_kwargs: Keyword arguments of one call, likewise. Without `example_args`, a call with as many positional
            arguments gives them in this order.
        num_chunks: Micro-batches of a batch, if there is no example; by default as many as stages, or, in one process,
            those of the model's plan.
        gather_output: Return the output on every process.

    Raises:
        TrainError: There are fewer parts than processes, `split_points` has another length than the stages need, or
            names a module that holds no weights or comes before the one named before it. Or, in one process, its plan
            has no room for so many rows at once.
    """
    state = PartialState()
    stages = state.num_processes
    rows = find_batch_size((tuple(example_args), dict(example_kwargs or {})))
    found = dispatched(model)
    if stages == 1 and found is not None and found.stages is not None:
        begins = compute_in_micro_batches(found, split_points, rows, num_chunks)
        _return_no_cache(model)
        model.hf_split_points = begins  # type: ignore[assignment]
        return model
    classes = frozenset(find_no_split_classes(model) if no_split_module_classes is None else no_split_module_classes)
    if isinstance(split_points, str):
        split_points = balanced_split_points(model, stages, classes)
    if len(split_points) != stages - 1:
        raise TrainError(
            f"split_points has {len(split_points)} names, but {stages} processes run {stages} stages: give {stages - 1}"
        )
    model.hf_split_points = list(split_points)  # type: ignore[assignment]
    if stages == 1:
        return model
    _return_no_cache(model)
    model._original_forward = model.forward  # type: ignore[assignment]
    names = () if example_args else _names_by_order(model, example_kwargs or {})
    parts = _staged(model, split_points, classes)
    staged = StagedForward(model, parts, rows, num_chunks or stages, gather_output, names)
    model.pippy_stage = staged  # type: ignore[assignment]
    model.forward = staged
    return model


def balanced_split_points(model: nn.Module, stages: int, no_split_classes: Collection[str] | None = None) -> list[str]:
    """Return the module that each stage but the first begins with, such that all hold nearly the same bytes.

    No stage begins with an embedding: it is called with what the model is called with, and not with what the stage
    before has computed.

    Args:
        no_split_classes: Classes whose modules stay in one stage; None detects them.

    Raises:
        TrainError: The model has fewer parts than stages.
    """
    classes = find_no_split_classes(model) if no_split_classes is None else no_split_classes
    parts: list[tuple[str, list[nn.Module]]] = []
    for name, part in _parts(model, "", frozenset(classes)):
        if parts and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            parts[-1][1].append(part)
        else:
            parts.append((name, [part]))
    if len(parts) < stages:
        raise TrainError(
            f"{type(model).__name__} has {len(parts)} parts that a stage may begin with: {stages} stages need as many"
        )
    seen: set[int] = set()
    before = [0]
    for _, together in parts:
        own = [each for part in together for each in part.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        before.append(before[-1] + sum(parameter.nbytes for parameter in own))
    chosen: list[int] = []
    for stage in range(1, stages):
        lowest, highest = (chosen[-1] if chosen else 0) + 1, len(parts) - (stages - stage)
        share = before[-1] * stage / stages
        chosen.append(min(range(lowest, highest + 1), key=lambda index: abs(before[index] - share)))
    return [parts[index][0] for index in chosen]


def _staged(model: nn.Module, split_points: Sequence[str], whole: Collection[str]) -> list[StagePart]:
    """Return the model's parts, each with its stage.

    Raises:
        TrainError: A stage would begin nowhere.
    """
    found: dict[nn.Module, StagePart] = {}  # a module may have several names
    begun = 0
    for name, module in _parts(model, "", whole, split_points):
        if begun < len(split_points) and f"{name}.".startswith(f"{split_points[begun]}."):
            begun += 1
        found.setdefault(module, StagePart(name, module, begun))
    if begun < len(split_points):
        raise TrainError(
            f"split_points: {split_points[begun]!r} is no module that holds weights and comes after "
            f"{split_points[begun - 1] if begun else 'the beginning'} in {type(model).__name__}"
        )
    return list(found.values())


def _parts(
    module: nn.Module, name: str, whole: Collection[str], split_points: Sequence[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with weights that are not cut, in the order of the model; one in which a stage begins is."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        kept = type(child).__name__ in whole or child._parameters or next(child.children(), None) is None
        if kept and not any(point.startswith(f"{path}.") for point in split_points):
            if next(child.parameters(), None) is not None:
                yield path, child
        else:
            yield from _parts(child, path, whole, split_points)


def _names_by_order(model: nn.Module, example: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of an example if their order is that of positional arguments, and not the model's order."""
    first = list(signature(model.forward).parameters)[: len(example)]
    return () if set(first) == set(example) else tuple(example)


def _return_no_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]

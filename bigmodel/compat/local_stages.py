"""`prepare_pippy` in one process: a dispatched model whose stages are on several accelerators.

Its batches are computed in micro-batches by what dispatching has attached (`dispatch.attach.micro_batches`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..devices import format_size
from ..dispatch.attach.dispatched import Dispatched
from ..errors import TrainError
from ..plan import Plan
from ..plan.memory.micro_batches import most_in_flight
from ..plan.result.stages import stage_runs


def compute_in_micro_batches(
    found: Dispatched, split_points: str | Sequence[str], rows: int | None, parts: int | None
) -> list[str]:
    """Have the calls of a dispatched model computed in micro-batches, for inference; return where its stages begin.

    Args:
        found: The record of the model, which has stages.
        split_points: Names of the parts that the second and each further stage begins with; "auto": as they do.
        rows: Rows of a micro-batch; None: a batch has so many `parts`. If that is None, too, micro-batches are those of
            the plan; if it has none, as many as there are accelerators.
        parts: Their number, if `rows` is None.

    Raises:
        TrainError: The stages begin elsewhere, or the plan has no room for so many rows at once.
    """
    assert found.micro_batches is not None
    assert found.stages is not None
    begins = [names[0] for _, names in stage_runs(found.plan)[1:]]
    if not isinstance(split_points, str) and list(split_points) != begins:
        raise TrainError(
            f"split_points are {list(split_points)}, but the model is dispatched to stages that begin with {begins}: "
            'dispatch it by another device map, or give split_points="auto"'
        )
    accelerators = len(set(found.stages.devices))
    if parts is None:
        rows = rows or found.plan.micro_batch_size
    chunks = parts or accelerators
    _check_room(found.plan, rows or -(-found.plan.batch_size // chunks), accelerators)
    found.micro_batches.size = rows
    found.micro_batches.parts = None if rows else chunks
    found.micro_batches.without_gradients = True
    return begins


def _check_room(plan: Plan, rows: int, accelerators: int) -> None:
    """Raise TrainError if the plan leaves too little for as many micro-batches at once as there may be."""
    if plan.micro_batch_size is not None and rows <= plan.micro_batch_size:
        return
    most = most_in_flight(accelerators)
    for key, device in plan.devices.items():
        each = -(-rows // plan.batch_size) * (device.activations + device.workspace)
        more = most * each - (device.activations + device.workspace)
        if device.free is not None and more > device.free:
            raise TrainError(
                f"micro-batches of {rows} rows, {most} at once, may take {format_size(more)} more of device {key} than "
                f"the plan has, which leaves {format_size(device.free)} of its budget: dispatch the model by a plan "
                f"that was made with micro_batch_size={rows}"
            )

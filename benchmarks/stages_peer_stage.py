"""A process of `stages_peer`: one stage of a model that accelerate's `prepare_pippy` has split.

    python -m benchmarks.stages_peer_stage LAYERS WIDTH INNER FLOPS ROWS...

It reads "forward ROWS", which computes a batch, and "logits", which asks for those of the last one. The last stage
answers both. The end of its input ends it.

accelerate makes as many stages as micro-batches unless it is told where to split, and pads batches whose rows are not
as many as their micro-batches: so it is told, and each row is a micro-batch, which is the shortest schedule, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from bigmodel.devices.virtual.clock import ComputeClock, sleep_until
from bigmodel.devices.virtual.traits import traits_of

from .stages import llama
from .stages_forward import batch
from .stages_peer import DONE


class SetSpeed(TorchDispatchMode):
    """A context in which the host's products take as long as a virtual accelerator's.

    As there, products are launched ahead of their results: leaving the context waits for them.

    Args:
        flops: Multiplications and additions per second.
    """

    def __init__(self, flops: float) -> None:
        super().__init__()
        self._clock = ComputeClock(flops)
        self._ready = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute it, and note when the accelerator would have."""
        traits = traits_of(func)
        if traits.is_product:
            left, right = traits.factors
            self._ready = self._clock.compute(self._ready, (args[left], args[right]))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        """Wait until all products are computed."""
        super().__exit__(*error)
        sleep_until(self._ready)


def at_set_speed(forward: Callable[..., Any], flops: float) -> Callable[..., Any]:
    """Return a function that computes `forward` at so many FLOP per second."""

    @wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        # The host's fused attention is not made of products; an accelerator written in Python has this one.
        with sdpa_kernel(SDPBackend.MATH), SetSpeed(flops):
            return forward(*args, **kwargs)

    return timed


def prepared(layers: int, width: int, inner: int, flops: float, rows: int, stages: int) -> Any:
    """Return the model in stages, of which this process computes its own at a set speed."""
    from accelerate import prepare_pippy

    begins = [f"model.layers.{stage * layers // stages}" for stage in range(1, stages)]
    model: Any = prepare_pippy(
        llama(layers, width, inner),
        split_points=begins,
        example_args=(batch(rows)[:1],),
        example_kwargs={"use_cache": False},
        num_chunks=rows,
    )
    stage = model.pippy_stage._stage.submod
    stage.forward = at_set_speed(stage.forward, flops)
    return model


def main(layers: int, width: int, inner: int, flops: float, rows: list[int]) -> None:
    """Compute this process's stage for each line of standard input."""
    from accelerate import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    with torch.no_grad():
        models = {each: prepared(layers, width, inner, flops, each, state.num_processes) for each in rows}
        logits: torch.Tensor | None = None
        for line in sys.stdin:
            asked = line.split()
            answer: Any = DONE
            if asked[0] == "forward":
                given = (batch(int(asked[1])),) if state.is_main_process else ()
                logits = models[int(asked[1])](*given)
            elif logits is not None:
                answer = logits.tolist()
            if state.is_last_process:
                print(json.dumps(answer), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    layers, width, inner, flops, *rows = sys.argv[1:]
    main(int(layers), int(width), int(inner), float(flops), [int(each) for each in rows])

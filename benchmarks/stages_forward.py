"""The forward of a batch of `benchmarks stages`: in micro-batches over several stages, whole, and by a peer.

The first and the last stage idle while micro-batches come and go: of m over n stages, n m / (m + n - 1) times the
throughput of one stage is the most that can be. Calls wait for their batch, so batches do not overlap.

The peer is accelerate's `prepare_pippy` (`stages_peer`), whose micro-batches are of one row.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import BenchmarkError, Limit, Samples, Variant
from .stages_peer import NAME as PEER

if TYPE_CHECKING:
    import torch

    from bigmodel.profile.machine.machine import MachineProfile

    from .stages_peer import Peer

TOKENS = 4
"""Tokens of each row."""


class Forward:
    """The same batch on one stage, over several at once in micro-batches, and over several whole.

    Args:
        count: Number of stages.
        rows: Rows of the batch.
        layers: Of the model.
        machine: The machine whose speeds the plan is made with.
        quick: Tiny sizes.
        peer: accelerate's stages of the same model; None: they are left out.

    Attributes:
        differing: Rows whose logits were not bit for bit those of a micro-batch alone.
        bubble: The largest share of the time in which a stage has computed nothing.

    Raises:
        BenchmarkError: The peer computes other logits, or the plan has no micro-batches.
    """

    def __init__(
        self, count: int, rows: int, layers: int, machine: MachineProfile, quick: bool, peer: Peer | None = None
    ) -> None:
        import torch

        self.count = count
        self.rows = rows
        self.differing = 0
        self.bubble = 0.0
        self._ids = batch(rows).to("virtual:0")
        self._peer = peer
        width, inner = widths(quick)
        self._models = {
            "one stage": _dispatched(layers, width, inner, 1, rows, None, machine),
            "whole": _dispatched(layers, width, inner, count, rows, None, machine),
            "micro-batches": _dispatched(layers, width, inner, count, rows, "auto", machine),
        }
        self.size = _size_of(self._models["micro-batches"])
        self._expected = torch.cat([self._forward("one stage", part) for part in self._ids.split(self.size)])
        if peer is not None:
            self._seconds_of_peer(peer)

    def most(self, size: int) -> float:
        """Return the most times the throughput of one stage that micro-batches of `size` rows can have, the first and
        the last one included."""
        parts = -(-self.rows // size)
        return self.count * parts / (parts + self.count - 1)

    def variants(self) -> list[Variant]:
        """What is measured: the seconds of a forward."""
        found = [Variant(self._name(name), partial(self._seconds, name)) for name in self._models]
        if self._peer is not None:
            found.append(Variant(self._name(PEER), partial(self._seconds_of_peer, self._peer)))
        return found

    def table(self, samples: Samples) -> list[list[Any]]:
        """Return a row for each way of computing the batch."""
        one = samples.median(self._name("one stage"))
        found: list[list[Any]] = []
        for name in [*self._models, *([PEER] if self._peer is not None else [])]:
            seconds = samples.median(self._name(name))
            stages = 1 if name == "one stage" else self.count
            what = f"{name} of {self.size}" if name == "micro-batches" else name
            most = {"micro-batches": self.most(self.size), PEER: self.most(1)}.get(name)
            found.append([stages, self.rows, what, f"{self.rows / seconds:.2f}", one / seconds, most])
        return found

    def gain(self, samples: Samples) -> float:
        """Return the throughput of the micro-batches in units of one stage's."""
        return samples.median(self._name("one stage")) / samples.median(self._name("micro-batches"))

    def limit(self, samples: Samples, share: float) -> Limit:
        """Return the limit of the gain: a share of the number of stages or, if no micro-batches of whole rows reach
        that, of the most that any can."""
        what = f"rows per second of {self.rows} rows over {self.count} stages"
        most = self.count * self.rows / (self.rows + self.count - 1)
        if most < share * self.count:
            what = f"{what}, of the {most:.2f} times one's that so few allow"
            return Limit(what, self.gain(samples) / most, ">=", share)
        return Limit(f"{what}, of {self.count} times one's", self.gain(samples) / self.count, ">=", share)

    def over_peer(self, samples: Samples) -> float | None:
        """Return the seconds of the micro-batches over those of the peer; None: it is left out."""
        if self._peer is None:
            return None
        return samples.ratio(self._name("micro-batches"), self._name(PEER)).median

    def _name(self, name: str) -> str:
        return f"forward of {self.rows} rows, {self.count} stages: {name}"

    def _seconds(self, name: str) -> float:
        import torch

        begun = time.perf_counter()
        found = self._forward(name, self._ids)
        seconds = time.perf_counter() - begun
        if name == "micro-batches":
            self.differing += sum(not torch.equal(one, other) for one, other in zip(found, self._expected, strict=True))
        return seconds

    def _seconds_of_peer(self, peer: Peer) -> float:
        """Return the seconds of the peer's forward, until its last stage has the logits, which are compared."""
        import torch

        begun = time.perf_counter()
        peer.forward(self.rows)
        seconds = time.perf_counter() - begun
        found = peer.logits()
        if not torch.allclose(found, self._expected, rtol=1e-4, atol=1e-4):
            raise BenchmarkError(f"{PEER} over {self.count} stages computes other logits than one stage")
        return seconds

    def _forward(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.no_grad():
            logits: torch.Tensor = self._models[name](ids, use_cache=False).logits
        return logits.cpu()


def batch(rows: int) -> torch.Tensor:
    """Return the token ids of a batch of so many rows, the same each time."""
    import torch

    return torch.randint(0, 64, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def widths(quick: bool) -> tuple[int, int]:
    """Return the widths of the model: of its hidden states, and of its feed-forward layers."""
    return (64, 128) if quick else (128, 1024)


def _dispatched(
    layers: int, width: int, inner: int, stages: int, rows: int, size: str | None, machine: MachineProfile
) -> Any:
    """Return a model whose layers are resident on so many accelerators."""
    from bigmodel.dispatch import dispatch_model
    from bigmodel.plan import plan

    from .stages import llama

    model = llama(layers, width, inner)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgets: dict[Any, int] = {**dict.fromkeys(range(stages), weights + 2**26), "cpu": 2**40}
    shape: dict[str, Any] = {"batch_size": rows, "context_length": TOKENS + 1, "new_tokens": 1}
    made = plan(model, budgets, "balanced", **shape, machine=machine, micro_batch_size=size)
    if len({part.runs_on for part in made.parts}) != stages:
        raise BenchmarkError(f"the plan for {stages} accelerators uses others")
    return dispatch_model(model, made)


def _size_of(model: Any) -> int:
    from bigmodel.dispatch import get_plan

    made = get_plan(model)
    if made is None or made.micro_batch_size is None:
        raise BenchmarkError("the plan finds micro-batches not worth it")
    return int(made.micro_batch_size)

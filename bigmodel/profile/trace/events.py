"""What happens in a forward as far as memory and time go: the events that a trace consists of."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.experts import Choice
from .work import Work

OUTSIDE = -1
"""The unit index of what runs between units."""


@dataclass(frozen=True)
class Allocate:
    """A storage of `nbytes` comes to life.

    Outside of units its device is that of `source`, a storage the operation read. If it read none (`OUTSIDE`), it is
    made beside what the unit before returned, as `torch.ones(..., device=embedded.device)` is. What else was read,
    `others`, as (storage, bytes of the tensor), is brought there for it from where it lies.
    """

    storage: int
    nbytes: int
    source: int = OUTSIDE
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Free:
    """A storage dies."""

    storage: int


@dataclass(frozen=True)
class Scratch:
    """A kernel takes `nbytes` of its own while it runs."""

    nbytes: int


@dataclass(frozen=True)
class Enter:
    """A unit starts; `inputs` are (storage, bytes of the tensor) of what it was called with."""

    unit: int
    inputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Leave:
    """A unit ends; `outputs` are (storage, bytes of the tensor) of what it returned."""

    unit: int
    outputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Operation:
    """An operation runs; `work` is what takes it time."""

    work: Work


@dataclass(frozen=True)
class Call:
    """`generate` calls the model with inputs made for this call, `fresh` as (storage, bytes of the tensor), and with
    some it keeps, `kept` bytes.

    It brings them to where the model's first weights lie. Where that is not where the model begins, the dispatched
    model brings them back while it runs: then those that are kept are there twice.
    """

    fresh: tuple[tuple[int, int], ...] = ()
    kept: int = 0


@dataclass(frozen=True)
class Return:
    """The model returns `outputs`, (storage, bytes of the tensor), which it brings to where its inputs came from.

    Those that were among the inputs, `given`, stay where they lie as well.
    """

    outputs: tuple[tuple[int, int], ...] = ()
    given: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Route:
    """Tokens come to experts that can be fetched one by one.

    Attributes:
        position: of the experts in the unit.
        choice: which they go to.
        nbytes: bytes of the tokens.
        counted: whether the tokens of each expert are counted, which "batched_mm" has no need to.
    """

    position: int
    choice: Choice
    nbytes: int = 0
    counted: bool = True


@dataclass(frozen=True)
class Routed:
    """The experts are done."""


@dataclass(frozen=True)
class Burst:
    """What a unit allocates for itself for a while: `peak` bytes more at most, and `net` more at the end."""

    peak: int
    net: int


Event = Allocate | Free | Scratch | Enter | Leave | Operation | Call | Return | Route | Routed | Burst

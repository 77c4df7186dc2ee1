"""The events of a trace: every allocation, free and operation of a forward, and what runs in it.

They name no devices: each belongs to the unit of the model that was running.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.experts import RouterChoice
from .work import Work

OUTSIDE = -1
"""The unit index of operations between units."""


@dataclass(frozen=True)
class Allocate:
    """A storage of `nbytes` is allocated.

    Outside units its device is that of `source`, an input of the operation. Without an input (`OUTSIDE`) it is that of
    the last unit's output, as with `torch.ones(..., device=embedded.device)`. Further inputs, `others` as (storage,
    bytes of the tensor), are copied there if they lie elsewhere.

    A model that brings a tensor to the device of a weight, as in `x.to(self.conv.weight.device)`, allocates only where
    the two lie on different devices. Such an event names the unit of the weight, `brought_to`; elsewhere the storage is
    that of `source`.

    What is computed from weights alone lies where these do: on the device of the first of the units `weights` that is
    on an accelerator, else in host memory.

    A view of a weight takes nothing where the weight lies. One that a unit returns, or is handed, is an event of its
    own, as it may be copied elsewhere: it names the unit of the weight, `view_of`.
    """

    storage: int
    nbytes: int
    source: int = OUTSIDE
    others: tuple[tuple[int, int], ...] = ()
    brought_to: int | None = None
    weights: tuple[int, ...] = ()
    view_of: int | None = None


@dataclass(frozen=True)
class Free:
    """A storage is freed."""

    storage: int


@dataclass(frozen=True)
class Scratch:
    """A kernel takes `nbytes` of workspace while it runs."""

    nbytes: int


@dataclass(frozen=True)
class OutsideUse:
    """An operation reads weights of units that it is not within: if these lie elsewhere, they are copied to it while it
    runs.

    Attributes:
        weights: (unit, bytes of the tensor) of each.
        source: as `Allocate.source`, which decides the device of the operation.
        alone: as `Allocate.weights`, if the operation reads nothing else.
        lasts: a function of several operations reads them: the copies last until the next `EndOfUse`.
    """

    weights: tuple[tuple[int, int], ...]
    source: int = OUTSIDE
    alone: tuple[int, ...] = ()
    lasts: bool = False


@dataclass(frozen=True)
class EndOfUse:
    """The function ends that the last `OutsideUse` belongs to."""


@dataclass(frozen=True)
class Enter:
    """A unit starts; `inputs` are (storage, bytes of the tensor) of its arguments."""

    unit: int
    inputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Leave:
    """A unit ends; `outputs` are (storage, bytes of the tensor) of its results: in a profile only of those that are
    moved to the main device (`Profile.returning`), and those of methods.

    Attributes:
        unit: its number.
        outputs: see above.
        source: None for its forward. For another method, the storage of its first input (`OUTSIDE`: one that is not
            recorded): outputs are moved to the device where this lies.
    """

    unit: int
    outputs: tuple[tuple[int, int], ...] = ()
    source: int | None = None


@dataclass(frozen=True)
class Operation:
    """An operation runs; `work` determines its time."""

    work: Work


@dataclass(frozen=True)
class Call:
    """`generate` calls the model, which returns at the next `Return`.

    `generate` moves the inputs to the device of the model's first weights. The dispatched model moves them to the
    device on which it starts. Inputs that `generate` keeps are alive on their own devices, too.

    Attributes:
        fresh: (storage, bytes of the tensor) of inputs that were made for this call.
        kept: the same of inputs that `generate` keeps after it.
    """

    fresh: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Return:
    """The model returns, and moves its outputs to the device that its inputs came from.

    Attributes:
        outputs: (storage, bytes of the tensor).
        given: storages of the inputs; outputs among them also stay where they are.
    """

    outputs: tuple[tuple[int, int], ...] = ()
    given: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Route:
    """Tokens reach a module of experts that can be fetched one by one.

    Attributes:
        position: position of the experts in the unit.
        choice: the router's choice.
        nbytes: bytes of the tokens.
        implementation: the experts function of transformers that is called; None or "eager": the class's own.
        itemsize: bytes of one element of the tokens.
        weight_itemsize: bytes of one element of the experts' weights for each token.
        expert_tensors: bytes of one expert in each of the module's fused tensors.
    """

    position: int
    choice: RouterChoice
    nbytes: int = 0
    implementation: str | None = "grouped_mm"
    itemsize: int = 1
    weight_itemsize: int = 1
    expert_tensors: tuple[int, ...] = ()

    @property
    def counts_rows(self) -> bool:
        """Whether the implementation counts the rows of each expert."""
        return self.implementation != "batched_mm"


@dataclass(frozen=True)
class Routed:
    """The module of experts ends."""


@dataclass(frozen=True)
class Burst:
    """Consecutive allocations and frees within a unit: `peak` bytes more at most, `net` more at the end."""

    peak: int
    net: int


@dataclass(frozen=True)
class RoutedCall:
    """A call of a module of experts that can be fetched one by one, from its `Route` to its `Routed`, condensed.

    Attributes:
        route: its beginning.
        events: what runs in it, with the numbers that it was recorded with: chunks depend on every tensor.
        condensed: the same condensed, for experts that are all there.
        peaks: bytes that `events` take in each way in which the experts may be called, as far as they are known.
    """

    route: Route
    events: tuple[Event, ...]
    condensed: tuple[Event, ...]
    peaks: dict[object, int] = field(default_factory=dict, compare=False, repr=False)


Event = (
    Allocate
    | Free
    | Scratch
    | OutsideUse
    | EndOfUse
    | Enter
    | Leave
    | Operation
    | Call
    | Return
    | Route
    | Routed
    | Burst
    | RoutedCall
)

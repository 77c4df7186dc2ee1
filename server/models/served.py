"""A model that a server has: loaded or not, its share of the budgets, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bigmodel.devices import DISK, HOST
from bigmodel.errors import BudgetError
from bigmodel.server.engine.budget import EngineOptions, claimed_bytes
from bigmodel.server.engine.compute.choose_runner import RunnerChoice
from bigmodel.server.engine.compute.encoder import generates
from bigmodel.server.loading import Loaded, Loader, Loading, PlannedModel
from bigmodel.server.models.garbage import collect
from bigmodel.server.models.policy import Key, LoadedShare, fits, nearly_as_good
from bigmodel.server.models.running import RunningModel

if TYPE_CHECKING:
    from bigmodel.plan import Plan

KEPT_PLANS = 16
"""Plans of a model that are kept for the next time that it has as much memory."""


@dataclass(eq=False)
class ServedModel:
    """One of the models of a server.

    Attributes:
        name: Its name for clients.
        source: What loads it; None for one that is there from the start.
        start: Makes a running model of a loaded one, with these options of its engine.
        options: Of its engine; where it is one of several, as far as they are for a model of its kind.
        adapters: Names of the LoRA adapters that it is loaded with.
        loading: Progress of the last load.
        running: What requests need of it, while it is loaded.
        claimed: Most bytes that it takes of each device, while it is loaded.
        longest: Tokens of its longest text, once it has been loaded; 0 before.
        leases: Requests that use it and are not in its engine yet.
        last_used: When it was leased last, in seconds of `time.monotonic`.
        closing: Whether it is about to be unloaded: it finishes what runs on it, and takes nothing more.
        bringing: Whether a load of it is under way, or waits for its turn.
        waiters: Requests that wait for it.
    """

    name: str
    source: Loader | PlannedModel | None = None
    start: Callable[[Loaded, EngineOptions], RunningModel] | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    adapters: tuple[str, ...] = ()
    loading: Loading = field(default_factory=Loading)
    running: RunningModel | None = None
    claimed: Mapping[Key, int] = field(default_factory=dict)
    longest: int = 0
    leases: int = 0
    last_used: float = field(default_factory=time.monotonic)
    closing: bool = False
    bringing: bool = False
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _unloading: threading.Lock = field(default_factory=threading.Lock)
    _plans: dict[tuple[tuple[Key, int], ...], Plan] = field(default_factory=dict)
    _runners: list[tuple[Plan, RunnerChoice]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether requests may take it."""
        return self.running is not None and not self.closing

    @property
    def in_use(self) -> bool:
        """Whether requests use it."""
        return self.leases > 0 or (self.running is not None and self.running.engine.unfinished > 0)

    @property
    def idle_since(self) -> float:
        """When it was used last, in seconds of `time.monotonic`."""
        return self.last_used if self.running is None else max(self.last_used, self.running.engine.idle_since)

    @property
    def share(self) -> LoadedShare:
        """What it has of the budgets."""
        return LoadedShare(self.name, self.claimed, not self.in_use, self.idle_since)

    @contextmanager
    def reading(self) -> Iterator[RunningModel | None]:
        """The model if it is loaded, which is not unloaded within the context: for threads that read its numbers."""
        with self._unloading:
            yield self.running

    # --- called in threads of their own, one at a time ----------------------------------------------

    def enough(self, budgets: Mapping[Key, int], left: Mapping[Key, int]) -> bool:
        """Whether what is left of the budgets is enough for it: to place it as with all of them, or nearly as well.

        Raises BudgetError for a model that not even all of them are enough for.
        """
        best = self._plan(budgets)
        if fits(self._claims(best), left):
            return True
        try:
            return nearly_as_good(self._plan(left), best)
        except BudgetError:
            return False

    def load(self, budgets: Mapping[Key, int], left: Mapping[Key, int], begin: Callable[[], bool]) -> None:
        """Load it, and start its engine before it becomes visible to requests.

        Args:
            budgets: Of the server, for one that is planned with them.
            left: What other models leave of them.
            begin: Called when its engine is built; returns whether to start it.
        """
        assert self.source is not None
        assert self.start is not None
        if isinstance(self.source, PlannedModel):
            plan = self._plan_within(budgets, left)
            self.claimed = self._claims(plan)
            loaded = replace(self.source.load(plan, self.loading), runner=self._runner_by(plan))
        else:
            loaded = self.source(self.loading)
        self.loading.begin("preparing the engine")
        running = self.start(loaded, self._engine_options(loaded))
        if isinstance(self.source, PlannedModel) and loaded.runner is None and generates(loaded.model):
            self._runners.append((plan, RunnerChoice.of(running.engine.core.runner)))
            del self._runners[:-KEPT_PLANS]
        if begin():
            running.engine.start()
        self.longest = running.engine.core.max_length
        self.running = running

    def unload(self, running: RunningModel) -> None:
        """Give the memory of what was `running` back."""
        try:
            with self._unloading:  # those that read it still have it; later ones do not see it
                running.unload()
        finally:
            collect(running.made)
            self.claimed = {}

    def _engine_options(self, loaded: Loaded) -> EngineOptions:
        options = self.options
        if loaded.limits is not None:
            options = replace(
                options, row_multiple=loaded.limits.row_multiple, kv_tokens=loaded.limits.kv_tokens, prefix_cache=False
            )
        if not isinstance(self.source, PlannedModel):
            return options
        if options.max_length is not None and loaded.plan.context_length:
            options = replace(options, max_length=min(options.max_length, loaded.plan.context_length))
        return options if generates(loaded.model) else replace(options, prefix_folder=None)

    def _runner_by(self, plan: Plan) -> RunnerChoice | None:
        """What its engine chose when it was placed by this plan; None if it never was."""
        return next((choice for known, choice in self._runners if known == plan), None)

    def _plan_within(self, budgets: Mapping[Key, int], left: Mapping[Key, int]) -> Plan:
        """The plan for what is left of the budgets: that for all of them where it fits."""
        best = self._plan(budgets)
        made = best if fits(self._claims(best), left) else self._plan(left)
        # The limit of the resident set is the process's, adapters and other models included.
        return made if made.resident_limit is None else replace(made, resident_limit=budgets[HOST])

    def _claims(self, plan: Plan) -> dict[Key, int]:
        """Most bytes that it takes of each device if it is placed by this plan."""
        assert isinstance(self.source, PlannedModel)
        claimed = claimed_bytes(plan, self.options)
        return {key: nbytes + (self.source.adapters_bytes if key != DISK else 0) for key, nbytes in claimed.items()}

    def _plan(self, left: Mapping[Key, int]) -> Plan:
        """The plan within some budgets, which is kept: the same models take turns with each other."""
        assert isinstance(self.source, PlannedModel)
        if self.source.changed():
            self._plans.clear()
            self._runners.clear()
        known = tuple(left.items())
        if known not in self._plans:
            if len(self._plans) == KEPT_PLANS:
                del self._plans[next(reversed(self._plans))]  # the first is for all of the budgets
            self._plans[known] = self.source.plan(left)
        return self._plans[known]

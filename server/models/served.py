"""A model that a server has: loaded or not, its share of the budgets, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bigmodel.devices import HOST
from bigmodel.server.engine.budget import EngineOptions, claimed_bytes
from bigmodel.server.loading import Loaded, Loader, Loading, PlannedModel
from bigmodel.server.models.policy import Key, LoadedShare
from bigmodel.server.models.running import RunningModel, collect

if TYPE_CHECKING:
    from bigmodel.plan import Plan


@dataclass(eq=False)
class ServedModel:
    """One of the models of a server.

    Attributes:
        name: Its name for clients.
        source: What loads it; None for one that is there from the start.
        start: Makes a running model of a loaded one.
        options: Of its engine.
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
    start: Callable[[Loaded], RunningModel] | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
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
    _alone: Plan | None = None  # its plan within the whole budgets

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

    def needed(self, budgets: Mapping[Key, int]) -> Mapping[Key, int]:
        """Bytes of each device that it takes where it has the whole budgets. Raises BudgetError if it fits nowhere."""
        return claimed_bytes(self._plan(budgets, budgets), self.options)

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
            plan = self._plan(budgets, left)
            self.claimed = claimed_bytes(plan, self.options)
            loaded = self.source.load(plan, self.loading)
        else:
            loaded = self.source(self.loading)
        self.loading.begin("preparing the engine")
        running = self.start(loaded)
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
            collect()
            self.claimed = {}

    def _plan(self, budgets: Mapping[Key, int], left: Mapping[Key, int]) -> Plan:
        """The plan with what is left of the budgets; that with all of them is made once."""
        assert isinstance(self.source, PlannedModel)
        if self._alone is None:
            self._alone = self.source.plan(budgets)
        if left == budgets:
            return self._alone
        made = self.source.plan(left)
        # The limit of the resident set is the process's, other models included.
        return made if made.resident_limit is None else replace(made, resident_limit=budgets[HOST])

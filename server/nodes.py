"""A served model over several nodes: the first process has the engine and the first stage, the others follow.

All processes load their stages by one plan, and agree on the limits of the engine: how rows are padded, so that no
stage's products depend on the batch, and how many positions of keys and values each has memory for. Cached prefixes are
of one process; over nodes there are none.
"""

from __future__ import annotations

import signal
from contextlib import suppress

import torch
import torch.distributed as dist

from bigmodel.errors import NodeLostError
from bigmodel.nodes.run import ThisStage, this_stage
from bigmodel.nodes.stages import RunningStage
from bigmodel.plan import NodesPlan
from bigmodel.server.engine.budget import ANY_NUMBER, EngineOptions, kv_budget
from bigmodel.server.engine.build import kv_maker
from bigmodel.server.engine.compute.host_linear import choose_host_linear, linear_of, probe_row_multiple
from bigmodel.server.engine.compute.runner import PackedRunner, input_device
from bigmodel.server.engine.compute.stages import PackedCaches
from bigmodel.server.loading import Loaded, Loading, LoadOptions, SharedLimits, load


class FirstStage:
    """The process that serves: loads the first stage as any model is loaded, and ends the others with itself.

    Args:
        model: A folder or a Hub id.
        plan: The plan for the nodes, of which this process is the first.
        options: Those of :func:`bigmodel.server.loading.load` that no plan has: ``revision``, ``offload_folder``.
        engine: Options of the engine.
        slow_links: Messages take as long as the plan's links take.
    """

    def __init__(
        self, model: str, plan: NodesPlan, options: LoadOptions, engine: EngineOptions, slow_links: bool = False
    ) -> None:
        self._model = model
        self._stage = this_stage(plan, slow_links)
        self._options = options
        self._engine = engine
        self._running: RunningStage | None = None

    def load(self, progress: Loading) -> Loaded:
        """Load it once all processes have met, and return it with the limits that all agreed on.

        Raises:
            NodeLostError: A process of another stage is gone; its own error says why.
        """
        progress.begin("waiting for the other nodes")
        ring = self._stage.meet()
        loaded = load(self._model, progress=progress, **_of_stage(self._options, self._stage))
        progress.begin("waiting for the other nodes to load")
        rows = self._engine.row_multiple
        if rows == "auto":
            library = linear_of(choose_host_linear(self._engine.host_linear))
            rows = probe_row_multiple(loaded.model, input_device(loaded.model), library)
        limits = _agree(SharedLimits(int(rows), ANY_NUMBER))
        self._running = self._stage.run(loaded.model, ring, PackedCaches())
        return Loaded(loaded.model, loaded.tokenizer, loaded.plan, checkpoint=loaded.checkpoint, limits=limits)

    def close(self) -> None:
        """End the processes that follow; where one is gone, the launcher ends them."""
        if self._running is not None:
            with suppress(NodeLostError):
                self._running.stop_others()


def follow(model: str, plan: NodesPlan, options: LoadOptions, engine: EngineOptions, slow_links: bool = False) -> None:
    """Load this process's stage and compute its part of each step until the first stage ends.

    Signals that end the deployment are the first stage's to answer: it finishes what runs, and ends this process.

    Args:
        model: As of :class:`FirstStage`, also those below.
        plan: The plan for the nodes.
        options: Of loading.
        engine: Of the engine.
        slow_links: Messages take as long as the plan's links take.

    Raises:
        NodeLostError: A process of another stage is gone.
        ServeError: There is no memory for keys and values.
    """
    from bigmodel.dispatch import from_pretrained

    stage = this_stage(plan, slow_links)
    ring = stage.meet()
    placed = from_pretrained(model, per_pass=False, **_of_stage(options, stage))
    runner = PackedRunner(placed, row_multiple=engine.row_multiple, host_linear=engine.host_linear)
    budget = kv_budget([runner], stage.stage.plan, engine, runner.gathered_per_token())
    limits = _agree(SharedLimits(runner.row_multiple, budget.tokens))
    caches = PackedCaches(kv_maker(runner, limits.kv_tokens, budget.in_ram), runner.host_linear)
    running = stage.run(placed, ring, caches)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with torch.inference_mode():
        running.follow()


def _of_stage(options: LoadOptions, stage: ThisStage) -> LoadOptions:
    return {**options, "device_map": stage.stage.plan, "layers": (stage.stage.start, stage.stage.stop)}


def _agree(own: SharedLimits) -> SharedLimits:
    """Return the limits that hold for all processes: each calls this once, with its own."""
    if not dist.is_initialized():
        return own
    found: list[SharedLimits] = [own] * dist.get_world_size()
    try:
        dist.all_gather_object(found, own)
    except RuntimeError as error:
        raise NodeLostError(f"a process of another stage did not load it: {error}") from error
    return SharedLimits(max(each.row_multiple for each in found), min(each.kv_tokens for each in found))

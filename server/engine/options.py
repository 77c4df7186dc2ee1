"""How an engine batches and what it may hold, as whoever starts it may say."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.server.engine.host_linear import HostLinear

DEFAULT_SEQUENCES = 16  # at once, where the plan has room for them


@dataclass(frozen=True)
class EngineOptions:
    """How the engine batches and what it may hold.

    ``max_sequences``: generated at once (None: :data:`DEFAULT_SEQUENCES`, or as many as the plan was made for or
    has room for). ``max_batch_tokens``: computed in one step; fewer where the plan was made for fewer, more where
    those are too few for so many sequences. ``kv_bytes``: bytes for keys and values on every device (None: from
    the plan, else a quarter of what is free). ``max_length``: prompt plus output of one sequence, in tokens (None:
    the model's context). ``max_queue``: sequences that may wait beyond those that run. ``row_multiple``: see
    :mod:`bigmodel.server.engine.invariance`; 1 gives up equal bits alone and in a batch for the speed of one stream.
    ``host_linear``: what multiplies by float32 weights on the host, see :mod:`bigmodel.server.engine.host_linear`.
    ``draft_tokens``: guesses a step, where there is a draft model.
    """

    max_sequences: int | None = None
    max_batch_tokens: int = 512
    max_queue: int = 128
    kv_bytes: int | None = None
    max_length: int | None = None
    prefix_cache: bool = True
    row_multiple: int | str = "auto"
    draft_tokens: int = 4
    host_linear: HostLinear = "auto"

"""Rank-aware logging and progress bars: on the main process only, or on every process."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from bigmodel.errors import TrainError


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages begin with the rank and whose methods take two further arguments.

    `main_process_only` (default True): only the main process logs. `in_order` (default False): every process logs, one
    after the other, whatever `main_process_only` is; all of them must call the method.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the processes that `main_process_only` and `in_order` select.

        Raises:
            TrainError: neither an Accelerator nor a PartialState was created.
        """
        from bigmodel.train.state.partial import PartialState

        if not PartialState._shared_state:
            raise TrainError("make an Accelerator() or a PartialState() before logging through get_logger")
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        state = PartialState()
        if not in_order:
            if state.is_main_process or not main_process_only:
                self._write(level, msg, args, kwargs)
            return
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self._write(level, msg, args, kwargs)
            state.wait_for_everyone()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this logger has warned with the same message and arguments before."""
        key = (str(msg), tuple(map(repr, args)))
        if key not in self._warned:
            self._warned.add(key)
            self.warning(msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with the rank before it, and the other arguments unchanged."""
        from bigmodel.train.state.partial import PartialState

        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[tuple[str, tuple[str, ...]]] = set()

    def _write(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text, options = self.process(msg, {**kwargs, "stacklevel": kwargs["stacklevel"] + 1})
        self.logger.log(level, text, *args, **options)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return the rank-aware logger `name`.

    Args:
        name: name of the logger.
        log_level: "DEBUG", "INFO", ...; by default that of ACCELERATE_LOG_LEVEL, else the logger's own.
    """
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return MultiProcessAdapter(logger)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm` with the same arguments; silent on all but the first process of a machine.

    Args:
        main_process_only: False shows a bar on every process.

    Raises:
        TrainError: the package tqdm is not installed, or the flag was passed as the first argument (an old order).
    """
    if args and isinstance(args[0], bool):
        raise TrainError("the first argument of tqdm is the iterable; pass main_process_only by name")
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise TrainError("tqdm is not installed: `pip install tqdm`") from error
    from bigmodel.train.state.partial import PartialState

    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = PartialState().local_process_index != 0
    return bar(*args, **kwargs)

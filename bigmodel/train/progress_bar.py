"""A progress bar that one process of each machine shows."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from bigmodel.train.state.partial import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a `tqdm` bar; with `main_process_only` it is silent on all but the main process of each machine."""
    if main_process_only:
        kwargs["disable"] = bool(kwargs.get("disable")) or not PartialState().is_local_main_process
    return _tqdm(*args, **kwargs)

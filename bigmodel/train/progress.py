"""A tqdm progress bar that shows on one process of each machine."""

from __future__ import annotations

from typing import Any

from bigmodel.errors import TrainError


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm` with the same arguments; silent on all but the first process of a machine.

    Args:
        main_process_only: False shows a bar on every process.

    Raises:
        TrainError: the package tqdm is not installed, or the flag was passed as the first argument (an old order).
    """
    if args and isinstance(args[0], bool):
        raise TrainError("tqdm takes what to iterate over first; pass main_process_only by its name")
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise TrainError("tqdm is not installed: `pip install tqdm`") from error
    from bigmodel.train.state.partial import PartialState

    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = PartialState().local_process_index != 0
    return bar(*args, **kwargs)

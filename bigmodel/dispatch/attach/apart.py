"""One line for models of one pipeline of which one lies whole on another accelerator than the others.

Nothing is attached to a model that lives where it runs, so nothing brings it what another model has computed elsewhere,
and PyTorch's error would not say what to do. Models that are dispatched with ``force_hooks=True`` bring their inputs.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary, ref

from torch import nn

from ...devices import is_accelerator
from ...devices.forks import new_lock
from .dispatched import Dispatched, dispatched

logger = logging.getLogger(__name__)

_lock = new_lock()
_models: WeakKeyDictionary[Dispatched, ref[nn.Module]] = WeakKeyDictionary()
"""Models that run on an accelerator and were not told to bring their inputs, by their records."""


def note_apart(model: nn.Module) -> None:
    """Log a line if a model that has just been dispatched, or one that was before, has nothing attached, and the other
    runs on another accelerator.

    Args:
        model: The model that has just been dispatched.
    """
    record = dispatched(model)
    if record is None or record.options.force_hooks or not is_accelerator(record.main_device):
        return
    with _lock:
        before = [(other, found) for found, at in _models.items() if (other := at()) and dispatched(other) is found]
        _models[record] = ref(model)
    for other, found in before:
        if found.main_device == record.main_device:
            continue
        if not record.attachments:
            _log(model, record, other, found)
            return
        if not found.attachments:
            _log(other, found, model, record)
            return


def _log(whole: nn.Module, record: Dispatched, other: nn.Module, found: Dispatched) -> None:
    logger.warning(
        "%s lies whole on %s, so that nothing moves its inputs there, and %s runs on %s: if one is given what the "
        "other has computed, dispatch %s with force_hooks=True",
        type(whole).__name__,
        record.main_device,
        type(other).__name__,
        found.main_device,
        type(whole).__name__,
    )

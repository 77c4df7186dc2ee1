"""Garbage collections of a process that serves: short ones, as nobody is answered meanwhile.

A full collection looks at every object of torch, transformers and the models, half a million: 0.4 s. So what there is
once the first model is loaded is exempted from collections. A model that was loaded later is not, and is found by a
short one when it is unloaded; for one that was exempted all objects are looked at, once.
"""

from __future__ import annotations

import gc

from bigmodel.devices import release_cached_memory


class _Exemptions:
    count = 0


def exemptions() -> int:
    """How often all objects were exempted: what was made before the last time is not found by a short collection."""
    return _Exemptions.count


def keep_what_is_loaded() -> None:
    """Exempt all objects that exist now from garbage collection, the first time that it is called in a process."""
    if not _Exemptions.count:
        gc.collect()
        _exempt()


def exempt_nothing() -> None:
    """Have all objects collected again, for a process that ends: objects that are exempt then are not freed in its
    end, and libraries report theirs as leaks on standard error."""
    gc.unfreeze()


def collect(made: int | None = None) -> None:
    """Collect garbage of models that were unloaded, and give memory that allocators keep back to their devices.

    Args:
        made: What `exemptions` returned when they were made; None: it is not known.
    """
    # Counting the exempted objects takes as long as looking at some of them: only where it has to be known.
    if (made is not None and made >= _Exemptions.count) or not gc.get_freeze_count():
        release_cached_memory()
        return
    gc.unfreeze()
    release_cached_memory()
    _exempt()


def _exempt() -> None:
    gc.freeze()
    _Exemptions.count += 1

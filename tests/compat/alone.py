"""What programs under the stand-in have done before anything is imported: accelerate is hidden, and bigmodel stands in.

The library that is installed cannot be found, so that nothing takes from it what the stand-in lacks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Any

import bigmodel.compat


class Hidden:
    """Finds no accelerate, nor lets the finders behind it find one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "accelerate":
            raise ModuleNotFoundError(f"no {name} here", name=name)
        return None


def hide() -> None:
    """Let no module and no distribution of accelerate be found. Raises AssertionError if one is."""
    found = importlib.metadata.MetadataPathFinder.find_distributions

    def others(*arguments: Any) -> Iterable[importlib.metadata.Distribution]:
        return (each for each in found(*arguments) if each.metadata["Name"] != "accelerate")

    importlib.metadata.MetadataPathFinder.find_distributions = others
    sys.meta_path.insert(0, Hidden())
    assert "accelerate" not in {each.metadata["Name"] for each in importlib.metadata.distributions()}
    try:
        import accelerate  # noqa: F401
    except ModuleNotFoundError:
        return
    raise AssertionError("accelerate is not hidden")


os.environ["HF_HUB_OFFLINE"] = "1"  # read when its library is imported
hide()
bigmodel.compat.install()

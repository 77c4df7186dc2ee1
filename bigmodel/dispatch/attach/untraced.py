"""Packages whose frames Dynamo does not trace, registered without importing Dynamo.

Importing `torch._dynamo` takes a second, and programs that compile nothing do not need it. Its rules are therefore
extended by an import hook, when other code imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RULES = "torch._dynamo.trace_rules"


@functools.cache
def leave_untraced(packages: tuple[str, ...]) -> None:
    """Have Dynamo skip the frames of `packages`, as it skips those of torch itself, now or when it is imported."""
    rules = sys.modules.get(RULES)
    if rules is not None:
        _skip(rules, packages)
    else:
        sys.meta_path.insert(0, _WhenImported(packages))


def _skip(rules: Any, packages: Sequence[str]) -> None:
    for package in packages:
        rules.add(package)


class _WhenImported(MetaPathFinder, Loader):
    """An import hook: loads the module of Dynamo's rules as usual, then extends the rules."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != RULES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        _skip(module, self._packages)

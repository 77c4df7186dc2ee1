"""Packages whose frames Dynamo leaves as they are, named before Dynamo is imported.

`torch._dynamo` takes a second to import, and a program that compiles nothing does without. Its rules are therefore
changed at the moment somebody else imports it. On virtual accelerators ``backend="eager"`` runs what was traced; there
is nothing for which other backends could make code.
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
    """Have Dynamo skip the frames of `packages`, as it skips those of torch itself: now or once it is imported."""
    rules = sys.modules.get(RULES)
    if rules is not None:
        _skip(rules, packages)
    else:
        sys.meta_path.insert(0, _WhenImported(packages))


def _skip(rules: Any, packages: Sequence[str]) -> None:
    for package in packages:
        rules.add(package)


class _WhenImported(MetaPathFinder, Loader):
    """Finds and loads the module of Dynamo's rules as others would, and then adds to the rules."""

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

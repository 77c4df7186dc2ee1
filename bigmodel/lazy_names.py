"""Packages whose public names are imported when they are first used.

The names are written once, in the package's stub, `__init__.pyi`, which type checkers and editors read too:

    from .home import Name as Name      Name is imported from `home` when it is first used
    from . import room as room          the package `room` is imported when it is first used; not part of `__all__`
    from .other import *                all names of `other`, itself a package of this kind
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as of `typing`, which would be most of what importing a package costs
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of `package`, for the names that its stub lists.

    Args:
        package: Dotted name of a package with a stub `__init__.pyi`.
    """
    homes: dict[str, str] = {}

    def listed() -> dict[str, str]:
        if not homes:
            homes.update(_read_stub(package))
        return homes

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(name for name, home in listed().items() if home != package)
        home = listed().get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module  # takes a millisecond, which Ctrl-C is not to wait for

        value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(listed())

    return get, names


def names_used_later(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module that imports some of its names when they are first used.

    Args:
        module: Its dotted name.
        homes: The module that each of these names is imported from.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes})

    return get, names


def _read_stub(package: str) -> dict[str, str]:
    """Return the module that each name is imported from in the stub of `package`."""
    # Imported here, so that to import a package of this kind costs next to nothing.
    import ast
    import pkgutil
    from importlib import import_module
    from importlib.util import resolve_name

    stub = pkgutil.get_data(package, "__init__.pyi")
    assert stub is not None
    homes: dict[str, str] = {}
    for statement in ast.parse(stub).body:
        if isinstance(statement, ast.ImportFrom):
            home = resolve_name("." * statement.level + (statement.module or ""), package)
            imported = [alias.name for alias in statement.names]
            names = import_module(home).__all__ if imported == ["*"] else imported
            homes.update(dict.fromkeys(names, home))
    return homes

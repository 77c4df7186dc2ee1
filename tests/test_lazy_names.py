"""A package whose stub lists what it offers: nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

INIT = "from bigmodel.lazy_names import lazy_names\n\n__getattr__, __dir__ = lazy_names(__name__)\n"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package `shop` that offers Bread and, of its package `shop.cellar`, Wine."""
    files = {
        "shop/__init__.py": INIT,
        "shop/__init__.pyi": "from .bakery import Bread as Bread\nfrom .cellar import *\n",
        "shop/bakery.py": "class Bread: ...\n",
        "shop/cellar/__init__.py": INIT,
        "shop/cellar/__init__.pyi": "from shop.cellar.barrel import Wine as Wine\n",
        "shop/cellar/barrel.py": "class Wine: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("shop")
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]


def test_names_come_from_where_the_stub_imports_them(shop: ModuleType) -> None:
    assert shop.Bread.__module__ == "shop.bakery"
    assert shop.Wine.__module__ == "shop.cellar.barrel"
    assert shop.Wine is sys.modules["shop.cellar"].Wine


def test_only_what_is_asked_for_is_imported(shop: ModuleType) -> None:
    assert dir(shop) == shop.__all__ == ["Bread", "Wine"]
    assert shop.Bread
    assert "shop.bakery" in sys.modules
    assert "shop.cellar.barrel" not in sys.modules


def test_a_name_is_looked_up_once(shop: ModuleType) -> None:
    assert "Bread" not in vars(shop)
    found = shop.Bread
    assert vars(shop)["Bread"] is found


def test_modules_of_the_package_are_imported_as_ever(shop: ModuleType) -> None:
    from shop import bakery  # type: ignore[import-not-found]

    assert bakery.Bread is shop.Bread


def test_another_name_is_an_error_that_says_so(shop: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'shop' has no attribute 'Cheese'"):
        _ = shop.Cheese
    with pytest.raises(ImportError, match="Cheese"):
        from shop import Cheese  # noqa: F401

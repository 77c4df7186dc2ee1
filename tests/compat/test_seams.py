"""Functions of other modules that are replaced when they are imported."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bigmodel.compat import seams
from bigmodel.compat.record import Record
from bigmodel.compat.seams import Seam, SeamFinder

SOURCE = """
import gc
WHILE_IMPORTED = gc.isenabled()
def answer(question): return question
def twice(original, question): return 2 * original(question)
"""


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """The report's content."""
    found = Record()
    monkeypatch.setattr(seams, "RECORD", found)
    return found


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that has a seam, not imported yet."""
    (tmp_path / "patched.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [SeamFinder(), *sys.meta_path])
    monkeypatch.setattr(seams, "SEAMS", (Seam("patched", "answer", ("question",), "patched:twice"),))
    yield "patched"
    sys.modules.pop("patched", None)


def test_a_function_is_replaced_once_its_module_is_imported(module: str, record: Record) -> None:
    assert importlib.import_module(module).answer(5) == 10
    assert record.seams == {"patched.answer": "in place"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def answer(question, politely): return question", "it takes (question, politely), and (question) is known"),
        ("", "patched has no such function"),
    ],
)
def test_a_function_that_is_not_as_known_is_left_alone(
    module: str, record: Record, source: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "patched.py").write_text(source)
    importlib.import_module(module)
    assert record.seams == {"patched.answer": f"left alone: {says}"}


@pytest.mark.parametrize("enabled", [False, True])
def test_the_garbage_collector_is_paused_meanwhile(module: str, enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert importlib.import_module(module).WHILE_IMPORTED is False
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_it_is_paused_while_the_module_of_a_model_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "transformers" / "models"
    folder.mkdir(parents=True)
    (folder / "modeling_tiny.py").write_text(SOURCE)
    (folder / "configuration_tiny.py").write_text(SOURCE)
    for package in ("transformers", "transformers.models"):
        made = ModuleType(package)
        made.__path__ = [str(tmp_path.joinpath(*package.split(".")))]
        monkeypatch.setitem(sys.modules, package, made)
    monkeypatch.setattr(sys, "meta_path", [SeamFinder(), *sys.meta_path])
    for name, runs in (("modeling_tiny", False), ("configuration_tiny", True)):
        found = importlib.import_module(f"transformers.models.{name}")
        monkeypatch.delitem(sys.modules, found.__name__)
        assert found.WHILE_IMPORTED is runs
        assert found.__spec__.loader.name == found.__name__, "its own loader"
    assert gc.isenabled()


def test_it_runs_again_if_the_import_fails(module: str, tmp_path: Path) -> None:
    (tmp_path / "patched.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module)
    assert gc.isenabled()

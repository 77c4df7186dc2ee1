"""What all tests share: one thread per operation, and virtual accelerators that come and go with a test."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import _pytest.logging
import pytest
import torch
from _pytest.logging import catching_logs
from filelock import FileLock

from bigmodel.devices import accelerators as accelerator_names
from bigmodel.devices import memory_allocated, virtual

from .accelerators import is_about_virtual, skip_what_is_missing, skip_without_virtual
from .dry_runs import equal_models_share_dry_runs as equal_models_share_dry_runs
from .examples import register_profiles

Once = Callable[[str, Callable[[Path], Any]], Any]
STAND_INS = 1
"""Virtual accelerators that stand in for CUDA's: most machines with a GPU have one."""
VIRTUAL_ROOM = Path(__file__).parent / "devices" / "virtual"

torch.set_num_threads(1)
register_profiles()


class RootLogs(catching_logs):  # type: ignore[type-arg]
    """Attaches a handler to the root logger alone.

    pytest 9 looks at all loggers for those that do not propagate, twice in each of a test's three phases: PyTorch and
    transformers have thousands, and most tests take less time than that. None of this project's is one.
    """

    def __enter__(self) -> Any:
        root = logging.getLogger()
        root.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return self.handler

    def __exit__(self, *_: object) -> None:
        root = logging.getLogger()
        if self.level is not None:
            root.setLevel(self.orig_level)
        root.removeHandler(self.handler)


_pytest.logging.catching_logs = RootLogs  # type: ignore[misc]


def pytest_configure(config: pytest.Config) -> None:
    """Register the device type of virtual accelerators, which modules of tests name before any test runs."""
    kind = config.getoption("--device")
    if kind != "cuda":
        virtual.enable(count=STAND_INS)
    if kind == "virtual":
        virtual.disable()
    elif kind == "cuda" and not (torch.cuda.is_available() or config.getoption("collectonly")):
        raise pytest.UsageError("--device cuda: PyTorch finds no CUDA device; add --collect-only to list the tests")
    else:
        virtual.enable = skip_without_virtual  # by benchmarks, say, that a test runs with their own device


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the room of virtual accelerators out, in a process that tests CUDA's."""
    return True if collection_path == VIRTUAL_ROOM and config.getoption("--device") != "virtual" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect single tests that are about virtual accelerators alone, in a process that tests CUDA's."""
    if config.getoption("--device") == "virtual":
        return
    left_out = [item for item in items if is_about_virtual(item)]
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "every_accelerator" in metafunc.fixturenames:
        metafunc.parametrize("every_accelerator", [metafunc.config.getoption("--device")], indirect=True)


TESTS_PER_COLLECTION = 6000
"""Garbage of this many tests may pile up before a collection looks at all objects, which takes seconds."""
_tests = itertools.count(1)


def _collect_everything() -> None:
    """Collect garbage of earlier tests too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


YOUNG = 20_000
"""Objects after which garbage is looked for: most are gone by then without it, as they are in no cycle."""


def pytest_collection_finish() -> None:
    """Collect garbage from now on, and exempt modules and collected tests from it."""
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    gc.enable()


def pytest_runtest_setup() -> None:
    """Let collections that a test asks for look only at objects made in it: many ask for dozens."""
    if next(_tests) % TESTS_PER_COLLECTION == 0:
        _collect_everything()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _shared_tls_context() -> Iterator[None]:
    """HTTP clients make a TLS context each, which takes 50 ms, and tests speak plain HTTP: let all have the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Computes a value, of what JSON knows, in one process of the run; the others, which may have tests of the same
    module, read it. Its arguments: a name, and a function that is given an empty folder."""
    own = tmp_path_factory.getbasetemp()
    of_all = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def value(name: str, compute: Callable[[Path], Any]) -> Any:
        folder = of_all / f"once-{name}"
        with FileLock(f"{folder}.lock"):
            answer = folder / "answer.json"
            if not answer.exists():
                folder.mkdir(exist_ok=True)  # it is there if another process has tried and failed
                answer.write_text(json.dumps(compute(folder)))
            return json.loads(answer.read_text())

    return value


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    """Fail a test that leaves work of two streams unordered, also where the error was caught."""
    virtual.races()
    yield
    assert not virtual.races()


@pytest.fixture(autouse=True)
def _kind_of_accelerators_stays(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail a test that makes virtual accelerators where CUDA's are tested, or takes those away that stand in."""
    yield
    kind = pytestconfig.getoption("--device")
    wanted = {"cuda": 0, "stand-in": STAND_INS}.get(kind)
    if wanted is not None and virtual.count() != wanted:
        found = virtual.count()
        virtual.enable(count=wanted)
        pytest.fail(f"{found} virtual accelerators are left, of {wanted}: mark the test with virtual_only")


def _in_use() -> bool:
    return any(memory_allocated(index) for index in range(len(accelerator_names())))


def _empty_accelerators() -> None:
    """Collect reference cycles of earlier tests that hold memory of accelerators: a look at all objects."""
    if _in_use():
        _collect_everything()


def _collect_cycles_of_test() -> None:
    """Collect reference cycles of this test that hold memory of accelerators."""
    if _in_use():
        gc.collect()


@pytest.fixture
def accelerators() -> Iterator[None]:
    """Two virtual accelerators without limits, empty at the start."""
    virtual.enable(count=2)
    _empty_accelerators()
    yield
    _collect_cycles_of_test()
    virtual.disable()


@pytest.fixture
def every_accelerator(request: pytest.FixtureRequest) -> Iterator[str]:
    """The accelerators that are tested, empty at the start: two virtual ones without limits, or CUDA's."""
    skip_what_is_missing(request.param, request.node)
    if request.param == "virtual":
        request.getfixturevalue("accelerators")
    _empty_accelerators()
    yield request.param
    _collect_cycles_of_test()

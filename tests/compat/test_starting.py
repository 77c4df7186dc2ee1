"""A function made ready to be started in several processes: it learns its rank from its index."""

from __future__ import annotations

import os

import pytest

from bigmodel.compat.starting import PrepareForLaunch, env_var_path_add

VARIABLES = ("LOCAL_RANK", "RANK", "NPROC", "NODE_RANK", "FORK_LAUNCHED")


def seen(*arguments: object) -> None:
    """Write down what the function is called with, and its variables."""
    found.append((arguments, {name: os.environ.get(name) for name in VARIABLES}))


found: list[tuple[tuple[object, ...], dict[str, str | None]]] = []


@pytest.fixture(autouse=True)
def begin(monkeypatch: pytest.MonkeyPatch) -> None:
    found.clear()
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards, also if the function sets it
        monkeypatch.delenv(name)


def test_several_processes_have_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setenv("NODE_RANK", "2")
    PrepareForLaunch(seen, "MULTI_CPU")(1, "a", 2)
    arguments, variables = found[0]
    assert arguments == ("a", 2)
    assert (variables["LOCAL_RANK"], variables["RANK"], variables["FORK_LAUNCHED"]) == ("1", "9", "1")


def test_one_process_has_none() -> None:
    PrepareForLaunch(seen)(0)
    assert (found[0][1]["RANK"], found[0][1]["FORK_LAUNCHED"]) == (None, "1")


def test_a_path_is_added_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_PATHS", raising=False)
    assert env_var_path_add("SOME_PATHS", "/a") == "/a"
    monkeypatch.setenv("SOME_PATHS", "/x:/y::")
    assert env_var_path_add("SOME_PATHS", "/a") == "/x:/y:/a"
    assert os.environ["SOME_PATHS"] == "/x:/y::"

"""Which tests run on CUDA: all that are not about virtual accelerators alone."""

from __future__ import annotations

import pytest

from .accelerators import is_about_virtual


@pytest.fixture
def made() -> str:
    return "virtual:1"


def test_of_the_host(request: pytest.FixtureRequest) -> None:
    assert not is_about_virtual(request.node)


def test_on_every_accelerator(request: pytest.FixtureRequest, every_accelerator: str) -> None:
    assert not is_about_virtual(request.node)


def test_by_its_fixture(request: pytest.FixtureRequest, accelerators: None) -> None:
    assert is_about_virtual(request.node)


def test_by_a_fixture_of_its_module(request: pytest.FixtureRequest, made: str) -> None:
    assert is_about_virtual(request.node)


@pytest.mark.virtual_only("counts")
def test_by_its_mark(request: pytest.FixtureRequest) -> None:
    assert is_about_virtual(request.node)


@pytest.mark.parametrize("device", ["cpu", "virtual:0"])
def test_by_its_parameter(request: pytest.FixtureRequest, device: str) -> None:
    assert is_about_virtual(request.node) == (device != "cpu")


def test_by_its_text(request: pytest.FixtureRequest) -> None:
    assert is_about_virtual(request.node), "it names virtual:0: " + "virtual:0"

"""Which link speeds a benchmark tries."""

from __future__ import annotations

import argparse

import pytest

from bigmodel.benchmarks.links import add_link, link_rates

USUAL = (1e9, 2e9)


def asked(*arguments: str, device: str = "virtual", quick: bool = False) -> list[float | None]:
    parser = argparse.ArgumentParser()
    add_link(parser)
    return link_rates(argparse.Namespace(**vars(parser.parse_args(arguments)), device=device, quick=quick), USUAL)


@pytest.mark.parametrize("quick", [False, True])
def test_speeds_that_are_given_are_tried(quick: bool) -> None:
    assert asked("--link", "0.5", "--link", "4", quick=quick) == [0.5e9, 4e9]


def test_else_the_usual_ones_of_which_a_quick_run_tries_one() -> None:
    assert asked() == [1e9, 2e9]
    assert asked(quick=True) == [1e9]


def test_a_real_link_has_the_speed_it_has() -> None:
    assert asked("--link", "0.5", device="cuda") == [None]

"""Whole models are run on a machine that is exactly known, and what was wrong with the single figures comes out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from bigmodel.profile.machine import calibrate
from bigmodel.profile.machine.calibrate import LEAST, MOST, calibrated, works_of
from bigmodel.profile.machine.machine import Curve, DeviceSpeed
from bigmodel.profile.machine.timing import QUICK
from bigmodel.profile.trace.work import MOVE, PRODUCT, work_of

from ..clock import Clock
from ..models import tiny_llama
from .recorded import record_once

CPU = torch.device("cpu")
FIGURE = 1e-9
CURVES = {
    f"{PRODUCT}:float32": Curve((1.0, 16.0), (FIGURE, 16 * FIGURE), grows=True),
    MOVE: Curve((1.0,), (FIGURE,)),
}
EFFORT = replace(QUICK, models=((64, 4), (256, 1)))


@cache
def measured(products: float = 1.0, call: float = 1e-5) -> DeviceSpeed:
    """Return the calibrated `CURVES` of a machine whose products take `products` times as long as they say."""

    def seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        work = work_of(func, args, kwargs, output)
        if work is None:
            return 0.0
        return call + DeviceSpeed(CURVES, call, call).seconds(work) * (products if work.kind == PRODUCT else 1.0)

    with pytest.MonkeyPatch.context() as monkeypatch, Clock(monkeypatch, seconds):
        record_once(monkeypatch)
        return calibrated(CURVES, CPU, EFFORT)


@pytest.mark.slow
def test_a_call_of_an_asynchronous_device_is_a_launch_of_a_model_that_does_little_else() -> None:
    """The figures of so small operations say that each takes a launch or more; they run beside it, and none of it is
    theirs."""
    launch = 1e-5

    def seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        return launch if work_of(func, args, kwargs, output) is not None else 0.0

    with pytest.MonkeyPatch.context() as monkeypatch, Clock(monkeypatch, seconds):
        record_once(monkeypatch)
        monkeypatch.setattr(calibrate, "is_asynchronous", lambda device: True)
        figures = {
            name: replace(curve, values=tuple(map((1e4).__mul__, curve.values))) for name, curve in CURVES.items()
        }
        found = calibrated(figures, CPU, EFFORT)
    assert found.asynchronous
    assert 0.6 * launch < found.call == found.call_cached <= launch


@pytest.mark.slow
def test_correct_figures_are_unchanged() -> None:
    product = measured().curves[f"{PRODUCT}:float32"]
    assert product.values == pytest.approx((FIGURE, 16 * FIGURE), rel=0.1)


@pytest.mark.slow
def test_products_that_take_longer_in_a_model_are_corrected() -> None:
    product = measured(2.5).curves[f"{PRODUCT}:float32"]
    assert product.values == pytest.approx((2.5 * FIGURE, 2.5 * 16 * FIGURE), rel=0.1)


@pytest.mark.slow
def test_correction_factors_are_bounded() -> None:
    for factor, bound in ((10.0, MOST), (0.1, LEAST)):
        product = measured(factor).curves[f"{PRODUCT}:float32"]
        assert product.values[0] == pytest.approx(bound * FIGURE, rel=0.1)


@pytest.mark.slow
def test_the_call_overhead_is_measured_with_a_tiny_model() -> None:
    slow, fast = measured().call_cached, measured(call=1e-6).call_cached
    assert slow == pytest.approx(10 * fast, rel=0.1)
    assert slow == pytest.approx(1e-5, rel=0.5)


@pytest.mark.slow
def test_the_works_of_a_model_are_those_of_its_prompt_and_of_its_last_step() -> None:
    prompt, step = works_of(tiny_llama(num_hidden_layers=1), 2, 9, CPU)
    products = [[work.rows for work in works if work.kind == PRODUCT] for works in (prompt, step)]
    assert max(products[0]) == 2 * 8
    assert max(products[1]) == 2

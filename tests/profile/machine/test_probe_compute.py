from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.profile.machine import probe_compute
from bigmodel.profile.machine.machine import Curve, DeviceSpeed
from bigmodel.profile.machine.probe_compute import computes_in, probe_device, with_routing
from bigmodel.profile.machine.timing import QUICK
from bigmodel.profile.trace.work import MOVE, PRODUCT, ROUTE, Work

from ..clock import Clock

CPU = torch.device("cpu")
CALL = 2e-4
aten = torch.ops.aten


@pytest.fixture
def uncorrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of single operations, as they are before whole models are run."""
    monkeypatch.setattr(probe_compute, "calibrated", lambda curves, *_: DeviceSpeed(curves, 0.0, 0.0))
    monkeypatch.setattr(probe_compute, "with_routing", lambda speed, *_: speed)


@pytest.mark.usefixtures("uncorrected")
def test_figures_exclude_the_call_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    each = {"product": 2e-6, "attention": 3e-6, "convolution": 5e-6, "pointwise": 7e-6}
    packed = {"int4": 13e-6, "int8": 17e-6}

    def seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        if func is aten.linear.default:
            return CALL + each["product"] * args[1].numel()
        if func is aten.scaled_dot_product_attention.default:
            return CALL + each["attention"] * (args[1].numel() + args[2].numel())
        if func is aten.conv2d.default:
            spanning = args[1].shape[-1] > 1
            return CALL + each["convolution" if spanning else "pointwise"] * args[1].numel()
        if func is aten._weight_int4pack_mm_for_cpu.default:
            return CALL + packed["int4"] * 2 * args[1].numel()
        if func is aten._weight_int8pack_mm.default:
            return CALL + packed["int8"] * args[1].numel()
        return CALL + 11e-9 * 3 * output.nbytes if func is aten.add.Tensor else 0.0

    with Clock(monkeypatch, seconds):
        found = probe_device(CPU, replace(QUICK, rows=(1, 128), at_least=0.0), [torch.float32]).curves
    of_weights = {f"product:{kind}" for kind in packed}
    assert set(found) == {"move", "product:float32:cached", *(f"{kind}:float32" for kind in each), *of_weights}
    for kind, expected in packed.items():
        assert found[f"product:{kind}"].at(1) == pytest.approx(
            expected, rel=0.15
        )  # a small product is taken for a call
    assert found["move"].at(1e6) == pytest.approx(11e-9, rel=0.01)
    for kind, expected in each.items():  # of a convolution the call is a part
        tolerance = 0.01 if kind in ("product", "attention") else 0.2
        assert found[f"{kind}:float32"].at(16) == pytest.approx(expected, rel=tolerance)


@pytest.mark.usefixtures("uncorrected")
def test_on_an_asynchronous_device_a_call_takes_the_longer_of_launch_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is subtracted: a kernel of less than a launch was taken for 2 % of what it is, and one of twice a launch
    for half."""
    launch, byte = 5e-6, 1e-9

    def seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        return max(launch, 3 * output.nbytes * byte) if func is aten.add.Tensor else launch

    monkeypatch.setattr(probe_compute, "is_asynchronous", lambda device: True)
    effort = replace(QUICK, moved=(2**8, 2**12, 2**16), at_least=0.0)
    with Clock(monkeypatch, seconds):
        found = probe_device(CPU, effort, [torch.float32])
    asynchronous = replace(found, call=launch, call_cached=launch, asynchronous=True)
    for nbytes in effort.moved:
        work = Work(MOVE, nbytes=3 * nbytes)
        assert asynchronous.total([work] * 8) == pytest.approx(8 * max(launch, 3 * nbytes * byte))


@pytest.mark.usefixtures("uncorrected")
def test_unsupported_dtypes_are_left_out() -> None:
    found = probe_device(CPU, QUICK, [torch.float32, torch.float8_e5m2])
    assert {name for name in found.curves if "float8" in name} == set()
    assert "product:float32" in found.curves


def test_the_host_computes_in_the_dtypes_of_models_and_not_in_those_of_storage() -> None:
    assert all(computes_in(dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    assert not any(computes_in(dtype, CPU) for dtype in (torch.float8_e5m2, torch.bool))


@pytest.mark.usefixtures("accelerators")
def test_a_full_device_raises_out_of_memory_instead_of_lacking_a_dtype() -> None:
    virtual.configure(0, capacity=300)  # the input fits, the output does not
    with pytest.raises(torch.OutOfMemoryError):
        computes_in(torch.float32, torch.device("virtual:0"))


@pytest.mark.slow
def test_routing_is_the_time_of_a_mixture_beyond_its_operations() -> None:
    nothing = Curve((1.0,), (1e-15,))
    speed = DeviceSpeed({MOVE: nothing, f"{PRODUCT}:float32": nothing}, 0.0, 0.0)
    found = with_routing(speed, torch.device("cpu"), QUICK)
    assert found.seconds(Work(ROUTE)) > 0
    assert speed.seconds(Work(ROUTE)) == 0.0

from __future__ import annotations

import torch

from bigmodel.profile.effort import QUICK
from bigmodel.profile.machine import Curve, DeviceSpeed
from bigmodel.profile.probe_routing import with_routing
from bigmodel.profile.work import MOVE, PRODUCT, ROUTE, Work


def test_routing_takes_what_a_mixture_takes_beyond_its_operations() -> None:
    nothing = Curve((1.0,), (1e-15,))
    speed = DeviceSpeed({MOVE: nothing, f"{PRODUCT}:float32": nothing}, 0.0, 0.0)
    found = with_routing(speed, torch.device("cpu"), QUICK)
    assert found.seconds(Work(ROUTE)) > 0
    assert speed.seconds(Work(ROUTE)) == 0.0

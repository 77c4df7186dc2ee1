from __future__ import annotations

import pytest

from bigmodel.plan import make_plan
from bigmodel.plan.concurrency import max_sequences
from bigmodel.profile import profile_model

from ..profile.models import Flat, tiny_llama


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("more", [0, 1, 5])
def test_what_is_free_holds_so_many_more_sequences(more: int) -> None:
    profile = profile_model(tiny_llama(), batch_size=2, context_length=64, device_type="virtual")
    exact = make_plan(profile, {0: "100MB"}).devices[0].total
    each = sum(profile.kv_cache) // 2
    assert max_sequences(make_plan(profile, {0: exact + more * each})) == 2 + more
    assert max_sequences(make_plan(profile, {0: exact + more * each + each - 1})) == 2 + more


def test_without_keys_and_values_nothing_is_said() -> None:
    assert max_sequences(make_plan(Flat(), {"cpu": 10**6})) is None

from __future__ import annotations

import gc

import pytest

from bigmodel.profile.collection import uncollected


def test_the_collector_rests_meanwhile_and_goes_on_also_after_an_error() -> None:
    with pytest.raises(ValueError), uncollected():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

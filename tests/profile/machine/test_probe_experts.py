from __future__ import annotations

import sys

from bigmodel.profile.machine.probe_experts import calls_in, seconds_of_call
from bigmodel.profile.machine.timing import QUICK


def test_a_call_takes_some_time_and_far_less_than_all_of_asking() -> None:
    assert 1e-8 < seconds_of_call(QUICK) < 1e-2


def test_calls_of_functions_in_python_and_in_c_are_counted() -> None:
    def work() -> int:
        return max(len([1]), len([2]))

    assert calls_in(work) == 4 + 1  # itself, and the end of the watching


def test_whoever_watched_before_watches_again() -> None:
    def watch(*_: object) -> None:
        pass

    sys.setprofile(watch)
    calls_in(lambda: None)
    found = sys.getprofile()
    sys.setprofile(None)
    assert found is watch

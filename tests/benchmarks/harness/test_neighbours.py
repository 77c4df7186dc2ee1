"""What other processes take of the machine, told apart from what we take ourselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bigmodel.benchmarks.harness.neighbours import Usage, neighbours_share, usage

CORES = os.cpu_count() or 1


def test_what_others_took_is_a_share_of_all_cores() -> None:
    before, after = Usage(0.0, 10.0, 5.0), Usage(2.0, 10.0 + 2.0 * CORES, 5.0 + CORES)
    assert neighbours_share(before, after) == pytest.approx(0.5)


def test_our_own_work_is_not_a_neighbour() -> None:
    assert neighbours_share(Usage(0.0, 0.0, 0.0), Usage(1.0, 1.0, 1.0)) == 0.0


def test_ticks_that_round_the_wrong_way_count_as_nothing() -> None:
    assert neighbours_share(Usage(0.0, 0.0, 0.0), Usage(1.0, 0.5, 0.6)) == 0.0


@pytest.mark.slow
def test_own_time_grows_with_own_work_and_never_passes_everything() -> None:
    before = usage()
    deadline = time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    after = usage()
    assert after.own - before.own >= 0.05
    assert after.everything > before.everything


@pytest.mark.slow
def test_a_child_at_work_is_no_neighbour() -> None:
    busy = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before = usage()
        while usage().own - before.own < 0.05:  # what it takes is counted while it still runs
            time.sleep(0.01)
        child.kill()

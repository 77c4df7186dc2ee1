from __future__ import annotations

import os

from bigmodel.profile.machine.processor import last_cache_bytes, processor_name, usable_cores


def test_the_processor_has_a_name_on_one_line() -> None:
    assert processor_name().strip() == processor_name() != ""
    assert "\n" not in processor_name()


def test_no_more_cores_are_usable_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_a_last_cache_is_larger_than_a_page() -> None:
    assert last_cache_bytes() > 4096

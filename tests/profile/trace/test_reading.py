"""Values of fake tensors as models read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bigmodel.profile.trace.reading import read_as_real, reading
from bigmodel.profile.trace.recorder import Recorder
from bigmodel.profile.trace.values import UnknownValue, Values, real_tensors


class Counting(Values):
    """Values that count the operations they run."""

    ran = 0

    def run(self, *args: Any) -> Any:
        self.ran += 1
        return super().run(*args)


@contextmanager
def dry_run(values: Values) -> Iterator[None]:
    with ExitStack() as stack:
        for each in (read_as_real(), FakeTensorMode(), Recorder(iter(()), values), reading(values)):
            stack.enter_context(each)
        yield


def test_known_numbers_are_listed_without_an_operation_for_each() -> None:
    values = Counting()
    with dry_run(values):
        ids = torch.zeros(3, 200, dtype=torch.long)
        with real_tensors():
            known = torch.arange(600).reshape(3, 200)
        values.give(ids, known)
        before = values.ran
        assert ids.tolist() == known.tolist()
        assert ids[1, :2].tolist() == [200, 201]
        assert values.ran - before == 2  # those of the slices


def test_unknown_numbers_are_not_listed() -> None:
    values = Values()
    with dry_run(values):
        unknown = torch.empty(3)
        with pytest.raises(UnknownValue):
            unknown.tolist()
        written = torch.zeros(3)
        written.copy_(unknown)
        with pytest.raises(UnknownValue):
            written.tolist()


def test_what_is_replaced_is_put_back_when_the_last_dry_run_ends() -> None:
    before = FakeTensor.tolist
    with read_as_real():
        with read_as_real():
            pass
        assert FakeTensor.tolist is not before
    assert FakeTensor.tolist is before

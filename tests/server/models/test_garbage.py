"""What there is once the first model is loaded is exempt from collections, and found where it is unloaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from bigmodel.server.models.garbage import _Exemptions, collect, exemptions, keep_what_is_loaded


class Node:
    """Refers to itself: only a collection of garbage frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_Exemptions, "count", 0)
    frozen = gc.get_freeze_count()
    yield
    if not frozen:
        gc.unfreeze()


@pytest.mark.slow
def test_collections_do_not_look_at_what_was_loaded_first() -> None:
    loaded: list[object] = [[] for _ in range(10_000)]
    frozen = gc.get_freeze_count()
    keep_what_is_loaded()
    assert gc.get_freeze_count() >= frozen + len(loaded)
    assert not any(each is loaded for each in gc.get_objects())
    later: list[object] = []
    keep_what_is_loaded()  # as each load calls it
    assert any(each is later for each in gc.get_objects())


@pytest.mark.slow
def test_what_was_exempted_is_found_where_it_is_looked_for_and_the_rest_is_exempt_again() -> None:
    made = exemptions()
    node = Node()
    first = weakref.ref(node)
    keep_what_is_loaded()
    del node
    exempt = gc.get_freeze_count()
    later, found = exemptions(), weakref.ref(Node())
    collect(later)  # as for a model that was loaded later
    assert first() is not None
    assert found() is None
    collect(made)
    assert first() is None
    assert gc.get_freeze_count() > exempt // 4  # garbage of other tests was exempt, too
    assert exemptions() > later  # what was there meanwhile is exempt now, too


@pytest.mark.slow
def test_all_objects_are_looked_at_where_it_is_not_known_when_they_were_made() -> None:
    found = weakref.ref(Node())
    gc.freeze()
    gc.collect()
    assert found() is not None
    collect()
    assert found() is None

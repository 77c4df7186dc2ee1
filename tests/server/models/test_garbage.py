"""What there is once the first model is loaded is exempt from collections, and found where it is unloaded.

A program of its own tells: to look at all objects takes seconds in a process that has collected all tests.
"""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.preloaded import run

pytestmark = pytest.mark.slow

PROGRAM = """
import gc, json, weakref
from bigmodel.server.models.garbage import collect, exemptions, keep_what_is_loaded

class Node:
    def __init__(self):
        self.own = self  # only a collection of garbage frees it

def is_looked_at(value):
    return any(each is value for each in gc.get_objects())

found = {}
gc.unfreeze()
made, node, loaded = exemptions(), Node(), [[] for _ in range(10_000)]
first = weakref.ref(node)
keep_what_is_loaded()
exempt, later = gc.get_freeze_count(), []
found["exempt, of those that were loaded"] = exempt >= len(loaded) and not is_looked_at(loaded)
keep_what_is_loaded()  # as each load calls it
found["looked at, of those that came later"] = is_looked_at(later)
del node
after, lone = exemptions(), weakref.ref(Node())
collect(after)  # as for a model that was loaded later
found["freed by a short collection"] = [first() is None, lone() is None]
collect(made)
found["freed by a collection of all"] = first() is None
found["exempt again"] = gc.get_freeze_count() > exempt // 4  # what was garbage before was exempt, too
found["counted"] = exemptions() > after  # what was there meanwhile is exempt now, too
node = Node()
unknown = weakref.ref(node)
gc.freeze()
del node
gc.collect()
found["freed though exempt"] = [unknown() is None]
collect()
found["freed though exempt"].append(unknown() is None)
print(json.dumps(found))
"""


@cache
def found() -> dict[str, object]:
    done = run(["-c", PROGRAM], check=True)
    answers: dict[str, object] = json.loads(done.stdout)
    return answers


def test_collections_do_not_look_at_what_was_loaded_first() -> None:
    assert found()["exempt, of those that were loaded"]
    assert found()["looked at, of those that came later"]


def test_what_was_exempted_is_found_where_it_is_looked_for_and_the_rest_is_exempt_again() -> None:
    assert found()["freed by a short collection"] == [False, True]
    assert found()["freed by a collection of all"]
    assert found()["exempt again"]
    assert found()["counted"]


def test_all_objects_are_looked_at_where_it_is_not_known_when_they_were_made() -> None:
    assert found()["freed though exempt"] == [False, True]

from __future__ import annotations

from bigmodel.profile.trace.cut import cut
from bigmodel.profile.trace.trace import Allocate, Enter, Free, Leave


def test_a_recording_is_cut_into_traces_that_know_what_was_alive() -> None:
    events = [Enter(1), Allocate(0, 8), Leave(1), Allocate(1, 4), Free(1), Enter(2), Free(0), Leave(2)]
    first, second = cut(events, [(0, 3), (5, 8)])
    assert first.initial == ()
    assert [(held.storage, held.nbytes, held.unit) for held in second.initial] == [(0, 8, 1)]
    assert second.events == tuple(events[5:8])

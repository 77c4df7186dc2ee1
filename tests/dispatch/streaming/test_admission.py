"""Calls begin in the order in which they came, as soon as there is room, and leave nothing held."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from bigmodel.dispatch.streaming.admission import Admission

from ..interrupting import interrupted_at


class Caller(threading.Thread):
    """Makes a call in a thread of its own; the call runs until it is told to end."""

    def __init__(self, admission: Admission, forwards: int = 1, error: Exception | None = None) -> None:
        super().__init__(daemon=True)
        self._admission, self._forwards, self._error = admission, forwards, error
        self.has_begun, self._may_end = threading.Event(), threading.Event()
        before = admission.waiting
        self.start()
        while not self.has_begun.wait(0.001) and admission.waiting == before:
            pass

    def run(self) -> None:
        try:
            self._admission.run(self._forwards, self._call, (), {})
        except ValueError:
            assert self._error is not None

    def _call(self) -> None:
        self.has_begun.set()
        self._may_end.wait(60)
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Let the call end, and wait until it has."""
        self._may_end.set()
        self.join(60)
        assert not self.is_alive()


def begun(*callers: Caller) -> list[bool]:
    return [caller.has_begun.is_set() for caller in callers]


def test_calls_run_at_once_while_there_is_room() -> None:
    admission = Admission(2)
    callers = [Caller(admission) for _ in range(3)]
    assert begun(*callers) == [True, True, False]
    assert admission.waiting == 1
    callers[0].end()
    assert callers[2].has_begun.wait(60)
    for caller in callers[1:]:
        caller.end()
    assert admission.waiting == 0


def test_a_call_that_needs_all_room_runs_alone_and_is_overtaken_by_none() -> None:
    admission = Admission(3)
    first, whole, after = Caller(admission), Caller(admission, 3), Caller(admission)
    assert begun(first, whole, after) == [True, False, False]
    first.end()
    assert whole.has_begun.wait(60)
    assert begun(after) == [False]
    whole.end()
    assert after.has_begun.wait(60)
    after.end()


def test_a_call_that_raises_lets_the_next_begin() -> None:
    admission = Admission(1)
    first, second = Caller(admission, error=ValueError("asked to fail")), Caller(admission)
    first.end()
    assert second.has_begun.wait(60)
    second.end()


def test_a_call_within_a_call_of_the_same_thread_is_part_of_it() -> None:
    admission = Admission(1)
    assert admission.run(1, lambda: admission.run(1, lambda x: x + admission.inside.now, (1,), {}), (), {}) == 2
    assert not admission.inside.now


def test_threads_whose_calls_of_two_models_cross_do_not_wait_for_one_another() -> None:
    first, second = Admission(1), Admission(1)
    barrier = threading.Barrier(2)

    def cross(outer: Admission, inner: Admission) -> None:
        outer.run(1, lambda: (barrier.wait(60), inner.run(1, int, (), {})), (), {})

    threads = [threading.Thread(target=cross, args=pair, daemon=True) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_called_gets_its_arguments_and_the_thread_is_inside_until_it_returns() -> None:
    admission = Admission(1)
    assert admission.run(1, lambda *args, **kwargs: (args, kwargs), (1,), {"a": 2}) == ((1,), {"a": 2})
    with pytest.raises(ValueError, match="asked"):
        admission.run(1, _fail, (), {})
    assert not admission.inside.now


def _fail() -> None:
    raise ValueError("asked to fail")


def in_another_thread(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_ctrl_c_at_any_moment_leaves_nothing_held() -> None:
    admission, number = Admission(1), 0
    while interrupted_at(number, lambda: admission.run(1, int, (), {}), within="dispatch"):
        assert not admission.inside.now, number
        assert in_another_thread(lambda: admission.run(1, int, (), {})), number
        number += 1
    assert number > 5


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is KeyboardInterrupt here, also where the shell that started the tests has it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to one thread")
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_wait_and_the_others_go_on() -> None:
    admission = Admission(1)
    running = Caller(admission)
    main = threading.get_ident()
    came: list[int] = []

    def interrupt() -> None:
        while admission.waiting < 1:
            running.join(0.001)
        behind.append(Caller(admission))
        signal.pthread_kill(main, signal.SIGINT)

    behind: list[Caller] = []
    helper = threading.Thread(target=interrupt, daemon=True)
    helper.start()
    try:
        admission.run(1, came.append, (1,), {})
    except KeyboardInterrupt:
        came.append(2)
    helper.join(60)
    assert came == [2]
    running.end()
    assert behind[0].has_begun.wait(60)
    behind[0].end()
    assert admission.waiting == 0

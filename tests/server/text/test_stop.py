"""Stop strings across any borders, against looking at the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.text.stop import StopChecker

letters = st.text(alphabet="ab", max_size=4)


def run(stop: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    """What is shown in all, and whether a stop string was met."""
    checker = StopChecker(stop)
    shown = ""
    for part in parts:
        text, stopped = checker.push(part)
        shown += text
        if stopped:
            return shown, True
    return shown + checker.flush(), False


@given(st.lists(letters.filter(bool), min_size=1, max_size=3), st.lists(letters, max_size=12))
def test_the_text_ends_before_the_first_stop_string_to_be_complete(stops: list[str], parts: list[str]) -> None:
    """The text so far is searched after each part; what is shown never reaches into a stop string."""
    expected, stopped = "".join(parts), False
    for count in range(1, len(parts) + 1):
        so_far = "".join(parts[:count])
        starts = [so_far.find(stop) for stop in stops if stop in so_far]
        if starts:
            expected, stopped = so_far[: min(starts)], True
            break
    assert run(tuple(stops), parts) == (expected, stopped)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(("END",))
    assert checker.push("the E") == ("the ", False)
    assert checker.push("N") == ("", False)
    assert checker.push("T") == ("ENT", False)
    assert checker.push(" END of") == (" ", True)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopChecker(()).push("anything") == ("anything", False)

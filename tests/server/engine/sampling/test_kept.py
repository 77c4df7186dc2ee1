"""Values that are asked for again outlive any number of those that are not, and both are bounded."""

from __future__ import annotations

from bigmodel.server.engine.sampling.kept import Kept


def test_texts_that_come_once_displace_none_that_came_again() -> None:
    kept = Kept[str](once=100, again=100, size=len)
    kept.put("a", "x" * 30)
    assert kept.get("a") == "x" * 30
    for number in range(50):
        kept.put(f"{number:02}", "y" * 28)
    assert kept.get("a") == "x" * 30
    assert [number for number in range(50) if kept.get(f"{number:02}")] == [47, 48, 49]


def test_each_share_is_bounded_and_drops_what_was_not_asked_for_the_longest() -> None:
    kept = Kept[str](once=100, again=100, size=len)
    for text in "abcdefgh":
        kept.put(text, "x" * 29)
        assert kept.get(text) is not None
        assert kept.nbytes <= 200
    assert [text for text in "abcdefgh" if kept.get(text)] == ["f", "g", "h"]
    assert kept.nbytes == 90


def test_one_value_is_kept_whatever_its_size() -> None:
    kept = Kept[str](once=1, again=1, size=len)
    kept.put("a", "x" * 50)
    assert kept.get("a") == "x" * 50
    kept.put("a", "other")
    assert kept.get("a") == "x" * 50

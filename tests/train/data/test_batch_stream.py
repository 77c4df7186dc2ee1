"""A pass over batches of indices knows its last batch when it gives it."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.train.data.batch_stream import BatchStream, IndexBatch


def batches(count: int) -> Iterator[IndexBatch]:
    return (IndexBatch([number], 1, 1, False, 1) for number in range(count))


def test_the_last_batch_is_known_as_such() -> None:
    stream = BatchStream(batches(3), 0, None)
    assert [(batch, stream.exhausted) for batch in stream] == [([0], False), ([1], False), ([2], True)]
    assert stream.produced == 3


def test_batches_are_skipped_and_an_empty_pass_ends_at_once() -> None:
    assert list(BatchStream(batches(3), 2, None)) == [[2]]
    for stream in (BatchStream(batches(3), 5, None), BatchStream(batches(0), 0, None)):
        assert not stream.exhausted  # nothing is read before the pass starts
        assert list(stream) == []
        assert stream.exhausted


def test_the_order_is_drawn_once_when_the_pass_starts() -> None:
    drawn: list[str] = []
    stream = BatchStream(batches(2), 0, lambda: drawn.append("now"))
    assert drawn == []
    stream.start()
    assert list(stream) == [[0], [1]]
    assert drawn == ["now"]


def test_what_is_known_of_each_batch_waits_to_be_read_in_order() -> None:
    stream = BatchStream(iter([IndexBatch([4, 5], 2, 1, True, 3)]), 0, None)
    list(stream)
    assert list(stream.notes) == [IndexBatch(None, 2, 1, True, 3)]

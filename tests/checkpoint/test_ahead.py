from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from bigmodel.checkpoint import ahead
from bigmodel.checkpoint.ahead import populated
from bigmodel.checkpoint.mapping import MappedFile
from bigmodel.errors import CheckpointError
from tests.checkpoint.test_pages import resident_pages

SIZE = 64 * 1024


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Twenty tensors in a file, four to a batch, three batches ahead at most."""
    monkeypatch.setattr(ahead, "_BATCH_BYTES", 4 * SIZE)
    monkeypatch.setattr(ahead, "_BYTES_AHEAD", 12 * SIZE)
    path = tmp_path / "t.bin"
    path.write_bytes(b"\1" * (20 * SIZE))
    file = MappedFile(path)
    return [file.tensor(torch.uint8, (SIZE,), i * SIZE) for i in range(20)]


def test_items_come_in_order_each_with_its_pages_in_memory(tensors: list[torch.Tensor]) -> None:
    seen = []
    for i in populated(range(20), lambda i: [tensors[i]]):
        assert resident_pages(tensors[i]) == SIZE // 4096
        seen.append(i)
    assert seen == list(range(20))


def test_reading_runs_only_so_far_ahead(tensors: list[torch.Tensor]) -> None:
    asked: list[int] = []

    def views(i: int) -> list[torch.Tensor]:
        asked.append(i)
        return [tensors[i]]

    items = populated(range(20), views)
    assert next(items) == 0
    assert len(asked) <= 16
    items.close()  # type: ignore[attr-defined]
    assert len(asked) <= 16


def test_an_item_may_have_several_tensors_or_none(tensors: list[torch.Tensor]) -> None:
    views = {"a": tensors[:7], "b": [], "c": [torch.empty(0)], "d": tensors[7:]}
    assert list(populated(views, views.__getitem__)) == list(views)


def test_many_small_items_share_a_batch(tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(ahead, "populate", lambda shown: calls.append(len(shown)))
    small = [tensor[:8] for tensor in tensors]
    assert list(populated(range(20), lambda i: [small[i]])) == list(range(20))
    assert calls == [20]


def test_a_failed_read_is_raised_and_the_threads_end(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise CheckpointError("the disk failed")

    monkeypatch.setattr(ahead, "populate", fail)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="the disk failed"):
        list(populated(range(20), lambda i: [tensors[i]]))
    assert threading.active_count() == before


def test_nothing_is_nothing() -> None:
    assert list(populated([], lambda _: [])) == []

"""What is kept of files and batches, and what clients see of it."""

from __future__ import annotations

import openai.types
import pytest

from bigmodel.server.batches import records
from bigmodel.server.batches.records import InputError, StoredFile, new_id
from tests.server.batches.making import batch


def test_ids_are_in_the_order_in_which_they_were_made() -> None:
    made = [new_id("file-") for _ in range(50)]
    assert sorted(made) == made
    assert len(set(made)) == 50


def test_a_new_state_has_the_time_at_which_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    before = batch()
    monkeypatch.setattr(records, "now", lambda: 77)
    after = before.changed("in_progress", total=3)
    assert (after.status, after.in_progress_at, after.total) == ("in_progress", 77, 3)
    monkeypatch.setattr(records, "now", lambda: 99)
    assert after.changed("in_progress").in_progress_at == 77
    assert (before.status, before.in_progress_at) == ("validating", None)


def test_clients_see_openais_objects_and_nothing_else() -> None:
    error = InputError(code="empty_file", message="no requests")
    for record, kind in (
        (batch("alice", errors=(error,), metadata={"a": "b"}), openai.types.Batch),
        (
            StoredFile(id="file-1", owner="alice", created_at=1, bytes=2, filename="x", purpose="batch"),
            openai.types.FileObject,
        ),
    ):
        shown = record.view()
        assert "alice" not in str(shown)
        assert shown.keys() <= kind.model_fields.keys()
        assert kind.model_validate(shown, strict=True).id == record.id
    seen = openai.types.Batch.model_validate(batch(errors=(error,)).view(), strict=True)
    assert seen.errors is not None
    assert seen.errors.data is not None
    assert [(each.code, each.line) for each in seen.errors.data] == [("empty_file", None)]


def test_a_batch_expires_a_day_after_it_was_made() -> None:
    made = batch()
    assert made.expires_at == made.created_at + 24 * 3600

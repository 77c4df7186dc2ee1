"""Batches are their owner's, are there after a restart, and are so many at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.server.batches.limits import TooManyBatchesError
from tests.server.batches.making import batch, batch_store


def test_a_batch_is_its_owners_alone(tmp_path: Path) -> None:
    store, mine = batch_store(tmp_path), batch("alice")
    store.add(mine)
    assert (store.get("alice", mine.id), store.of("alice")) == (mine, [mine])
    assert (store.get("bob", mine.id), store.of("bob"), store.get("", mine.id)) == (None, [], None)


def test_what_was_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    store, made = batch_store(tmp_path), [batch(), batch()]
    for each in made:
        store.add(each)
        store.save(each)
    store.save(made[1].changed("failed"))
    again = batch_store(tmp_path)
    assert [each.status for each in again.of("")] == ["validating", "failed"]
    assert again.unfinished() == made[:1]
    again.forget(made[0].id)
    assert [each.id for each in batch_store(tmp_path).of("")] == [made[1].id]


def test_a_file_is_in_use_until_its_batch_has_ended(tmp_path: Path) -> None:
    store, made = batch_store(tmp_path), batch(input_file_id="file-9")
    store.add(made)
    assert store.uses("file-9")
    store.put(made.changed("completed"))
    assert not store.uses("file-9")


def test_so_many_are_unfinished_at_most(tmp_path: Path) -> None:
    store = batch_store(tmp_path, unfinished=2)
    first = batch()
    store.add(first)
    store.add(batch())
    with pytest.raises(TooManyBatchesError, match="2 batches"):
        store.add(batch())
    store.put(first.changed("cancelled"))
    store.add(batch())


def test_of_those_that_have_ended_the_oldest_of_the_busiest_owner_is_forgotten(tmp_path: Path) -> None:
    store = batch_store(tmp_path, batches=4)
    made = [batch(owner) for owner in ("bob", "alice", "alice", "carol")]
    for each in made:
        assert store.add(each) == []
        if each.owner != "carol":
            store.put(each.changed("completed"))
    assert store.add(batch("bob")) == [made[1].id]
    assert [each.id for each in store.of("alice")] == [made[2].id]

"""Files are bounded, seen once they are complete, and by their owner alone; they are there after a restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bigmodel.server.batches import records
from bigmodel.server.batches.limits import FileInUseError, FileTooLongError, StoreFullError
from tests.server.batches.making import file_store, kept


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    files = file_store(tmp_path)
    mine = kept(files, b"content", "alice")
    assert files.path(mine.id).read_bytes() == b"content"
    assert (mine.bytes, mine.filename, mine.purpose) == (7, "input.jsonl", "batch")
    assert (files.get("alice", mine.id), files.of("alice")) == (mine, [mine])
    assert (files.get("bob", mine.id), files.of("bob")) == (None, [])
    assert (files.get("", mine.id), files.of("")) == (None, [])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "file-", "", ".", "x\0y"])
def test_a_name_that_is_not_a_files_leads_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.data").touch()
    assert file_store(tmp_path / "files").get("", name) is None


def test_files_are_there_after_a_restart_in_their_order(tmp_path: Path) -> None:
    files = file_store(tmp_path)
    made = [kept(files, b"%d" % number) for number in range(3)]
    again = file_store(tmp_path)
    assert again.of("") == made
    assert again.total_bytes == 3


def test_nobody_sees_a_file_that_is_being_written_and_one_that_nobody_completes_is_deleted(tmp_path: Path) -> None:
    files = file_store(tmp_path)
    pending = files.begin("")
    pending.write(b"half")
    assert (files.get("", pending.id), files.of("")) == (None, [])
    again = file_store(tmp_path)  # after a kill
    assert again.of("") == []
    again.delete_unknown({pending.id})
    assert again.path(pending.id).exists()
    again.delete_unknown(())
    assert not list(tmp_path.iterdir())


def test_a_file_has_so_many_bytes_at_most(tmp_path: Path) -> None:
    pending = file_store(tmp_path).begin("", 10)
    pending.write(b"x" * 10)
    with pytest.raises(FileTooLongError, match="more than 10 bytes"):
        pending.write(b"x")


def test_all_files_together_have_so_many_bytes_at_most(tmp_path: Path) -> None:
    files = file_store(tmp_path, total_bytes=10)
    first = kept(files, b"x" * 6)
    pending = files.begin("")
    pending.write(b"x" * 4)
    with pytest.raises(StoreFullError, match="10 bytes"):
        pending.write(b"x")
    assert files.path(pending.id).stat().st_size == 4
    pending.discard()
    assert not files.path(pending.id).exists()
    files.delete(first)
    kept(files, b"x" * 10)


def test_there_are_so_many_files_at_most(tmp_path: Path) -> None:
    files = file_store(tmp_path, files=2)
    first = kept(files, b"")
    files.begin("")
    with pytest.raises(StoreFullError, match="2 files"):
        files.begin("")
    files.delete(first)
    files.begin("")


def test_one_key_has_its_share_of_the_bytes_and_files_at_most(tmp_path: Path) -> None:
    files = file_store(tmp_path, total_bytes=20, files=8, share=0.5)
    first = kept(files, b"x" * 6, "alice")
    pending = files.begin("alice")
    pending.write(b"x" * 4)
    with pytest.raises(StoreFullError, match="all files of this key together may have 10 bytes"):
        pending.write(b"x")
    kept(files, b"x" * 10, "bob")
    pending.discard()
    files.delete(first)
    for _ in range(4):
        kept(files, b"", "alice")
    with pytest.raises(StoreFullError, match="this key has 4 files"):
        files.begin("alice")
    again = file_store(tmp_path, total_bytes=20, files=8, share=0.5)
    with pytest.raises(StoreFullError, match="this key has 4 files"):
        again.begin("alice")
    kept(again, b"x" * 5, "carol")


def test_the_input_of_an_unfinished_batch_is_not_deleted(tmp_path: Path) -> None:
    files = file_store(tmp_path)
    file = kept(files, b"")
    files.in_use = lambda file_id: file_id == file.id
    with pytest.raises(FileInUseError, match=file.id):
        files.delete(file)
    assert files.get("", file.id) is file


def test_a_file_whose_time_has_passed_is_gone_unless_a_batch_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = file_store(tmp_path)
    pending = files.begin("")
    file = pending.publish("x", "batch", seconds=100)
    assert files.of("") == [file]
    assert file.expires_at is not None
    later = file.expires_at
    monkeypatch.setattr(records, "now", lambda: later)
    assert (files.get("", file.id), files.of("")) == (None, [])
    files.in_use = lambda file_id: True
    files.delete_expired()
    assert files.path(file.id).exists()
    files.in_use = lambda file_id: False
    files.delete_expired()
    assert not list(tmp_path.iterdir())


def test_what_follows_the_last_complete_line_is_cut_off(tmp_path: Path) -> None:
    files = file_store(tmp_path)
    pending = files.begin("")
    pending.write(b"first\n" + b"y" * 200 + b"\nthi")
    pending.close()
    again = file_store(tmp_path).reopen(pending.id, "")
    assert again.complete_lines() == [b"first\n", b"y" * 128]
    again.write(b"last\n")
    assert files.path(pending.id).read_bytes() == b"first\n" + b"y" * 200 + b"\nlast\n"
    assert again.size == 212


def test_what_an_earlier_run_has_begun_has_its_place(tmp_path: Path) -> None:
    pending = file_store(tmp_path).begin("")
    pending.write(b"a\n" * 10)
    pending.close()
    files = file_store(tmp_path, files=1, total_bytes=10)
    kept(files, b"x")
    again = files.reopen(pending.id, "")
    assert (len(again.complete_lines()), files.total_bytes) == (10, 21)
    with pytest.raises(StoreFullError):
        again.write(b"a\n")
    with pytest.raises(StoreFullError):
        files.reopen("file-2", "")


def test_a_file_that_is_reopened_is_seen_again_when_it_is_published(tmp_path: Path) -> None:
    files = file_store(tmp_path)
    first = kept(files, b"a\n")
    again = files.reopen(first.id, "")
    assert files.get("", first.id) is None
    assert file_store(tmp_path).of("") == []
    again.publish("x", "batch_output")
    assert [file.bytes for file in file_store(tmp_path).of("")] == [2]


def test_a_write_that_fails_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = file_store(tmp_path)
    pending = files.begin("")
    pending.write(b"a\n")
    real, calls = pending._file, []

    class Full:
        def write(self, data: memoryview) -> int:
            calls.append(len(data))
            if len(calls) == 1:
                return real.write(data[:3])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(pending, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        pending.write(b"longer\n")
    assert (files.path(pending.id).read_bytes(), pending.size, files.total_bytes) == (b"a\n", 2, 2)

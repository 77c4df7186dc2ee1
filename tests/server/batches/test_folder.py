"""One server uses a folder at a time; what a killed one left behind does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import ServeError
from bigmodel.server.batches.folder import BatchFolder, read_records, remove_record, write_record
from bigmodel.server.batches.records import Batch
from tests.server.batches.making import batch


def test_a_second_server_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = BatchFolder(tmp_path / "here")
    with pytest.raises(ServeError, match="another server uses"):
        BatchFolder(tmp_path / "here")
    first.close()
    BatchFolder(tmp_path / "here").close()
    assert (tmp_path / "here" / "files").is_dir()


def test_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    for folder in (BatchFolder(tmp_path / "here"), BatchFolder(None)):
        for path in (folder.files, folder.batches, folder.files.parent):
            assert path.stat().st_mode & 0o777 == 0o700
        folder.close()


def test_one_that_was_not_given_goes_with_the_server() -> None:
    folder = BatchFolder(None)
    (folder.files / "x").touch()
    folder.close()
    assert not folder.files.parent.exists()


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match=str(tmp_path / "file")):
        BatchFolder(tmp_path / "file")


def test_records_come_back_the_oldest_first_and_wrong_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [batch() for _ in range(3)]
    for each in reversed(made):
        write_record(tmp_path, each)
    (tmp_path / "batch_0.json").write_text("{")
    (tmp_path / "other.json").write_text(made[0].model_dump_json())  # not its name
    assert list(read_records(tmp_path, Batch)) == made
    assert "batch_0.json is left out" in caplog.text
    for _ in range(2):
        remove_record(tmp_path, made[0].id)
    assert list(read_records(tmp_path, Batch)) == made[1:]


def test_files_that_a_killed_process_had_not_written_whole_are_removed(tmp_path: Path) -> None:
    BatchFolder(tmp_path).close()
    torn = tmp_path / "batches" / ".batch_1.json.12345678.tmp"
    torn.touch()
    BatchFolder(tmp_path).close()
    assert not torn.exists()

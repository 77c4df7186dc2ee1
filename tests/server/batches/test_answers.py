"""Answers are appended as they come, in OpenAI's form; a later run knows which there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.server.batches.answers import Answered, AnswerFiles
from bigmodel.server.batches.file_store import FileStore
from bigmodel.server.batches.limits import BatchLimits
from bigmodel.server.batches.lines import check_input
from bigmodel.server.batches.records import Batch
from tests.server.batches.making import ENDPOINT, answers, batch, file_store, kept, line, lines

OK = Answered(200, "req_1", b'{"text": "hi"}')
BAD = Answered(400, "req_2", b'{"error": {"message": "no"}}')


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return file_store(tmp_path)


def contents(files: FileStore, made: Batch) -> list[bytes]:
    return [files.path(each).read_bytes() for each in (made.output_id, made.error_id)]


def test_what_succeeded_and_what_failed_are_two_files(files: FileStore) -> None:
    made = batch("alice")
    written = AnswerFiles(files, made)
    written.add(1, "b", OK)
    written.add(0, 'a "quoted" é', BAD)
    assert (written.done, written.completed, written.failed) == ({0, 1}, 1, 1)
    assert files.of("alice") == []
    shown = written.publish()
    assert shown == {"output_file_id": made.output_id, "error_file_id": made.error_id}
    output, error = (answers(content) for content in contents(files, made))
    assert output["b"].pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req_1", "body": {"text": "hi"}}
    assert output == {"b": {"custom_id": "b", "response": response, "error": None}}
    assert error['a "quoted" é']["response"]["status_code"] == 400
    assert error['a "quoted" é']["error"] is None
    names = [(file.purpose, file.filename) for file in files.of("alice")]
    assert names == [("batch_output", f"{made.id}_output.jsonl"), ("batch_output", f"{made.id}_error.jsonl")]


def test_a_file_without_answers_is_not_shown(files: FileStore) -> None:
    made = batch()
    written = AnswerFiles(files, made)
    written.add(0, "a", OK)
    assert written.publish() == {"output_file_id": made.output_id}
    assert not files.path(made.error_id).exists()


def test_a_later_run_goes_on_behind_the_last_whole_answer(files: FileStore, tmp_path: Path) -> None:
    made = batch()
    first = AnswerFiles(files, made)
    first.add(7, "h", OK)
    first.add(3, "d", BAD)
    first.add(9, "j", OK)
    first.close()
    path = files.path(made.output_id)
    path.write_bytes(path.read_bytes()[:-5])  # killed while it wrote
    again = AnswerFiles(file_store(tmp_path), made)
    assert (again.done, again.completed, again.failed) == ({3, 7}, 1, 1)
    again.add(9, "j", OK)
    again.publish()
    assert answers(path.read_bytes()).keys() == {"h", "j"}


def test_answers_that_were_shown_before_the_batch_had_ended_are_gone_on_with(files: FileStore, tmp_path: Path) -> None:
    made = batch()
    first = AnswerFiles(files, made)
    first.add(0, "a", OK)
    first.publish()
    again = AnswerFiles(file_store(tmp_path), made)
    assert again.done == {0}
    assert again.publish() == {"output_file_id": made.output_id}


def test_an_answer_is_one_line_for_every_client(files: FileStore) -> None:
    made = batch()
    written = AnswerFiles(files, made)
    body = json.dumps({"text": "a\nb\x85c\u2028d\u2029e"}, indent=1, ensure_ascii=False).encode()
    written.add(0, "a\u2028b", Answered(200, "", body))
    content = contents(files, made)[0].decode()
    assert len(content.splitlines()) == 1
    assert json.loads(content)["response"]["body"] == {"text": "a\nb\x85c\u2028d\u2029e"}


def test_requests_without_an_answer_have_the_same_error(files: FileStore) -> None:
    made = batch()
    stored = kept(files, lines(*(line(name) for name in "abc")))
    requests = check_input(files.path(stored.id), ENDPOINT, BatchLimits())
    written = AnswerFiles(files, made)
    written.add(1, "b", OK)
    written.add_missing(requests, "batch_expired", "too late")
    assert (written.completed, written.failed) == (1, 2)
    error = answers(contents(files, made)[1])
    assert {name: (each["response"], each["error"]) for name, each in error.items()} == {
        name: (None, {"code": "batch_expired", "message": "too late"}) for name in "ac"
    }

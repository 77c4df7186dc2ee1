"""`bigmodel add-key`: a key is printed once; its hash and limits are in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.cli.main import run
from bigmodel.server.http.keys import KeyRing, parse_keys


def test_keys_are_added_to_a_file_of_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert run(["add-key", str(file), "alice", "--requests", "60", "--tokens", "1000"]) == 0
    assert run(["add-key", str(file), "bob"]) == 0
    first, second = capsys.readouterr().out.split()
    ring = KeyRing(parse_keys(file.read_text(), "keys"))
    alice, bob = ring.find(first.encode()), ring.find(second.encode())
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.requests, alice.tokens) == ("alice", 60, 1000)
    assert (bob.name, bob.requests, bob.tokens) == ("bob", None, None)
    assert first not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_keeps_its_lines_and_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nplain")
    file.chmod(0o640)
    assert run(["add-key", str(file), "bob"]) == 0
    assert file.read_text().startswith("# ours\nplain\nsha256:")
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [("k name=bob\n", "bob", "stands above already"), ("", "a b", "a name has"), ("x y\n", "bob", "line 1")],
)
def test_what_cannot_be_added_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, name: str, message: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    assert run(["add-key", str(file), name]) == 1
    assert file.read_text() == content
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out

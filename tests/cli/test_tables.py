"""What is printed in a pipe is not cut to a terminal."""

from __future__ import annotations

import pytest
from rich.table import Table

from bigmodel.cli.tables import print_tables


def test_one_after_the_other_with_room_for_long_names(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("layer." * 15)
    print_tables("first", table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "first"
    assert any("layer." * 15 in line for line in lines)

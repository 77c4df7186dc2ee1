"""Tables of the guide: each is a table of its own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "benchmarks.md").read_text()


@pytest.mark.slow
def test_each_table_of_a_result_is_a_table_of_its_own() -> None:
    markdown = pytest.importorskip("markdown", reason="markdown is missing: make docs installs it")
    spec = importlib.util.spec_from_file_location("guide_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    made = markdown.markdown(hooks.on_page_markdown(PAGE), extensions=["tables", "md_in_html"])
    written = len(re.findall(r"^\| ?-", PAGE, re.MULTILINE))
    assert made.count("<table>") == len(re.findall("<!-- (table|limits): ", PAGE)) + written

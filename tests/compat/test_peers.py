"""How tests that others wrote are run: a file in which no test ran is a failure, and not a file without failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..examples import alike
from .peers import accelerate, cases

pytestmark = pytest.mark.slow  # each file is run by a pytest of its own


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are installed take longer to import than the files to run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


PASSES = "def test_passes():\n    import accelerate\n    assert 'bigmodel' in accelerate.__version__\n"
FAILS = "def test_fails():\n    assert False\n"
BROKEN = "import no_such_module\n\ndef test_passes():\n    pass\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like that of accelerate's source, whose tests are those that are written into it."""
    helpers = tmp_path / "src" / "accelerate" / "test_utils"
    helpers.mkdir(parents=True)
    (helpers / "__init__.py").touch()
    (tmp_path / "tests").mkdir()
    monkeypatch.setenv("ACCELERATE_SOURCE", str(tmp_path))
    return tmp_path


@alike(
    ("content", "code", "says"),
    [
        ("", 1, "given: NO TEST RAN"),
        (PASSES, 0, "1 of 1 passed; 0 failed without a reason"),
        (FAILS, 1, "test_given.py::test_fails: NO REASON"),
        (BROKEN, 1, "test_given.py::: NO REASON"),
    ],
    first=1,
    ids=["holds none", "passes", "fails", "is not imported"],
)
def test_a_file_passes_if_a_test_of_it_ran(
    source: Path, capsys: pytest.CaptureFixture[str], content: str, code: int, says: str
) -> None:
    (source / "tests" / "test_given.py").write_text(content)
    assert accelerate.main(["given"]) == code
    assert says in capsys.readouterr().out


def test_a_file_that_is_not_there_is_a_failure(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate.main(["missing"]) == 1
    assert "missing: NO TEST RAN" in capsys.readouterr().out


def test_a_run_without_cases_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_empty.py").touch()
    with pytest.raises(RuntimeError, match="pytest ran no case"):
        cases.run_cases(tmp_path, "no:terminalreporter_of_nobody", ["test_empty.py"], {})


def test_cases_are_counted_by_how_they_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_given.py").write_text(
        "import pytest\ndef test_passes(): pass\ndef test_fails(): raise ValueError('why')\n"
        "def test_skips(): pytest.skip('no GPU')\n"
    )
    found = cases.run_cases(tmp_path, "no:terminalreporter_of_nobody", ["test_given.py"], {})
    assert found.passed == ["test_given::test_passes"]
    assert found.skipped == {"test_given::test_skips": "no GPU"}
    assert found.failed == {"test_given::test_fails": "ValueError: why"}
    assert cases.told("these", found, {}) == 1
    assert cases.told("these", found, {}, {"ValueError": "known"}) == 0
    assert "NO REASON: ValueError: why" in capsys.readouterr().out

"""Standing in for accelerate: what `import accelerate` finds, where, and when it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .answers import PROGRAMS, ROOT, answers

pytestmark = pytest.mark.slow  # each starts interpreters that import PyTorch
VERSION = "1.15.0+bigmodel.0.1.0"


@cache
def standing_in() -> dict[str, Any]:
    return answers("standing_in")


def test_importing_the_room_changes_nothing() -> None:
    assert standing_in()["importing the room patches nothing"]
    assert standing_in()["report before"].endswith("nothing is changed")


def test_installing_imports_next_to_nothing() -> None:
    assert standing_in()["imported by installing"] == []


def test_importing_names_imports_neither_planning_nor_loading() -> None:
    assert standing_in()["imported with names"] == []


def test_the_package_and_its_metadata_name_both_versions() -> None:
    assert (standing_in()["version"], standing_in()["metadata"]) == (VERSION, VERSION)
    assert standing_in()["spec"] == "accelerate"


def test_libraries_that_look_whose_distribution_it_is_take_it_for_accelerate() -> None:
    assert "huggingface" in standing_in()["home page"]


def test_its_modules_are_those_of_this_project() -> None:
    assert standing_in()["hooks are one module"]
    assert standing_in()["attributes without import"] == "bigmodel.utils.modeling"


def test_an_unknown_name_is_an_import_error_that_names_it() -> None:
    assert "'nothing' from 'accelerate'" in standing_in()["unknown name"]
    assert "'nothing' from 'bigmodel.hooks'" in standing_in()["unknown name of a module"]
    assert "accelerate.nothing is not among the modules" in standing_in()["unknown module"]


def test_transformers_takes_it_for_accelerate() -> None:
    assert standing_in()["transformers sees it"]


def test_spawned_processes_inherit_it() -> None:
    assert standing_in()["spawned"] == VERSION


def test_the_report_lists_every_seam() -> None:
    assert "transformers.modeling_utils._get_device_map: not imported" in standing_in()["report"]


def test_it_is_refused_after_a_library_that_has_looked_for_accelerate() -> None:
    found = answers("too_late")
    assert "peft is imported already" in found["peft"]
    assert "transformers is imported already" in found["transformers"]
    assert not found["installed"]


def test_the_command_runs_a_script_under_it() -> None:
    options = ("--batch-size", "2", "--context", "64")
    found = answers("version", "--report", "x", before=("-m", "bigmodel", "run", *options))
    assert found.pop("workload") == ["2", "64"]
    assert found == {"version": VERSION, "arguments": ["--report", "x"], "name": "__main__"}


def test_notebooks_load_it_as_an_extension() -> None:
    pytest.importorskip("IPython")
    assert answers("notebook") == {"version": VERSION}


def test_the_command_reports_at_the_end() -> None:
    command = [sys.executable, "-m", "bigmodel", "run", "--report", "-m", "tests.compat.programs.version"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert VERSION in done.stdout
    assert "bigmodel stands in for accelerate" in done.stderr


def test_errors_of_a_program_are_shown_as_python_shows_them() -> None:
    program = [str(PROGRAMS / "fails.py")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain, under_it = (
        subprocess.run([sys.executable, *before, *program], capture_output=True, text=True, env=variables)
        for before in ((), ("-m", "bigmodel", "run"))
    )
    assert "in reads_what_is_missing" in plain.stderr
    assert (under_it.returncode, under_it.stderr) == (plain.returncode, plain.stderr)


def test_a_module_that_is_missing_is_said_in_a_line() -> None:
    command = [sys.executable, "-m", "bigmodel", "run", "-m", "no_such_module"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (1, "bigmodel: No module named no_such_module\n")


def test_a_plugin_of_pytest_installs_before_any_conftest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import accelerate\n")
    (tmp_path / "test_it.py").write_text(
        f"import accelerate\n\n\ndef test_it():\n    assert accelerate.__version__ == {VERSION!r}\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "bigmodel.compat.pytest_plugin", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no other plugins
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    assert f"accelerate: {VERSION}" in done.stdout
    assert "bigmodel stands in for accelerate" in done.stdout

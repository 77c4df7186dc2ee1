"""Results as data: one JSON file per benchmark and device, replaced atomically."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .machine import describe_machine, device_slug
from .report import Report

_COMMITTED = Path(__file__).resolve().parent.parent / "results"


def results_folder() -> Path:
    """Return the default folder of results: that of a checkout, else `benchmark-results` in the current folder."""
    return _COMMITTED if _COMMITTED.is_dir() else Path("benchmark-results")


def result_data(report: Report, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a report with the machine, command line and date, to interpret and repeat it."""
    return {
        "command": command_line(arguments),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        **report.to_data(),
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the command that was run, with paths shortened to their last part."""
    shown = [Path(text).name if os.sep in text and Path(text).exists() else text for text in arguments]
    return shlex.join(["python", "-m", "benchmarks", *shown])


def result_path(report: Report, folder: Path) -> Path:
    """Return the file that a report is stored in."""
    return folder / f"{report.name}-{device_slug(report.device)}.json"


def save_report(report: Report, arguments: Sequence[str], folder: Path | None = None) -> Path:
    """Write a report with its picture to `folder` (default: :func:`results_folder`), atomically; return its path."""
    from bigmodel.atomic_files import write_text

    folder = folder or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = result_path(report, folder)
    text = json.dumps(result_data(report, arguments), indent=1) + "\n"
    write_text(path, text)
    if report.picture:
        write_text(path.with_suffix(".svg"), report.picture)
    return path

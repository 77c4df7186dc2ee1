"""What operators copy from the guide: every metric exists, the unit is one that systemd takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import httpx
import pytest

from bigmodel.server import Settings
from tests.server.live import serving, tiny_app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"


@pytest.mark.slow
def test_the_dashboard_asks_for_metrics_that_the_server_has() -> None:
    with serving(tiny_app()) as url:
        text = httpx.get(url + "/metrics").text
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    known = {name for name, kind in kinds.items() if kind != "histogram"}
    known |= {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"bigmodel_\w+", t["expr"])}
    assert len(asked) >= 12
    assert asked <= known


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "bigmodel.service"
    text = (DEPLOY / "bigmodel.service").read_text()
    unit.write_text(text.replace("/opt/bigmodel/bin/bigmodel", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_unit_hands_over_keys_that_only_root_can_read(tmp_path: Path) -> None:
    """A file of `bigmodel add-key` is its owner's alone, and the user that systemd makes is not its owner."""
    keys = tmp_path / "keys"
    made = subprocess.run(
        [sys.executable, "-m", "bigmodel", "add-key", str(keys), "alice"], capture_output=True, check=False
    )
    assert (made.returncode, keys.stat().st_mode & 0o777) == (0, 0o600)
    text = (DEPLOY / "bigmodel.service").read_text()
    assert "DynamicUser=yes" in text
    credentials = re.findall(r"^LoadCredential=(\w+):/etc/bigmodel.keys$", text, re.MULTILINE)
    read = re.findall(r"^ExecStart=.*--api-key-file \$\{CREDENTIALS_DIRECTORY\}/(\w+)", text, re.MULTILINE)
    assert credentials == read == ["keys"]


def test_the_container_copies_what_the_package_is_built_of() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    links = {path.resolve().name for path in (ROOT / "bigmodel").iterdir() if path.is_symlink()}
    assert {"pyproject.toml", "bigmodel", *links} <= copied


def test_the_container_has_what_schemas_and_images_need_and_time_to_drain() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert {"images", "json"} <= {*extras.split(",")} <= {*(metadata("bigmodel").get_all("Provides-Extra") or ())}
    (seconds,) = re.findall(r"^# .*--stop-timeout (\d+) ", text, re.MULTILINE)
    assert int(seconds) > Settings("tiny").drain_timeout

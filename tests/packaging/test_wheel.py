"""The built wheel, installed alone into an empty environment and used from an empty folder.

The environment sees the packages that bigmodel depends on, and not the working tree.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
USE = """
import contextlib, io, json, os, sys
import bigmodel, bigmodel.benchmarks, bigmodel.server
from bigmodel.cli.main import run

def printed(*arguments):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert run(arguments) == 0
    return output.getvalue()

model, results = sys.argv[1:]
found = {
    "imported": [module.__file__ for module in (bigmodel, bigmodel.benchmarks, bigmodel.server)],
    "names": {name: getattr(bigmodel, name, None) is not None for name in bigmodel.__all__},
    "plan": printed("plan", model, "--max-memory", "cpu=1GiB", "--context", "32", "--json"),
    "generate": printed("generate", model, "the", "--max-tokens", "8"),
    "bench": printed("bench", "host-kernels", "--quick", "--results", results),
    "kept": os.listdir(results),
}
print(json.dumps(found), flush=True)
sys.exit(run(["serve", model, "--port", "0"]))
"""
NOT_SOURCE = ("build", "dist", "site", "shared", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree, links kept, without what earlier builds left."""
    folder = tmp_path_factory.mktemp("source") / "bigmodel"

    def left_out(path: str, names: list[str]) -> set[str]:
        ignored = shutil.ignore_patterns(*NOT_SOURCE)(path, names)
        return {name for name in names if name in ignored or (path == str(ROOT) and name.startswith("."))}

    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree."""
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone in its site-packages, which finds dependencies in those of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    pip("--python", str(folder / "bin" / "python"), "install", "--no-index", "--no-deps", "--no-compile", str(wheel))
    (site_packages(folder) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder


@dataclass(frozen=True)
class Used:
    """What one process of the environment imports in an empty folder, what commands print in it, and what it serves."""

    found: dict[str, Any]
    process: subprocess.Popen[str]
    log: Path

    def address(self) -> str:
        """The address of the server, once its model is loaded."""
        while True:
            said = self.log.read_text()
            assert self.process.poll() is None, said
            found = [word.rstrip("/.,)") for word in said.split() if word.startswith("http://")]
            if found and is_ready(found[0]):
                return found[0]
            time.sleep(0.1)


@pytest.fixture
def used(environment: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Used]:
    """One process for all commands: each interpreter takes seconds to import what they need."""
    command = [environment / "bin" / "python", "-c", USE, checkpoint, tmp_path_factory.mktemp("results")]
    empty, log = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("log") / "log"
    pipe = subprocess.PIPE
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, cwd=empty, env=outside(), stdout=pipe, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Used(json.loads(line), process, log)
        finally:
            process.terminate()


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into `folder` and return its path."""
    return build("wheel", source, folder)


def build(what: str, source: Path, folder: Path) -> Path:
    """Have the build backend make a "wheel" or an "sdist", as pip and build do, but without their own processes."""
    code = f"from setuptools.build_meta import build_{what}; build_{what}({str(folder)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, env=outside(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[what])
    return built


def pip(*arguments: str) -> None:
    """Run pip and show what it said if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outside())
    assert done.returncode == 0, done.stdout + done.stderr


def outside() -> dict[str, str]:
    """The variables of this process without those that would show the working tree to another."""
    hidden = ("PYTHONPATH", "BIGMODEL_VIRTUAL")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"HF_HUB_OFFLINE": "1"}


def site_packages(environment: Path) -> Path:
    """The folder that packages are installed into."""
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def names(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_installs_one_top_level_package(wheel: Path, environment: Path) -> None:
    top_level = {name.split("/")[0] for name in names(wheel)}
    assert top_level == {"bigmodel", "bigmodel-0.1.0.dist-info"}
    installed = {path.name for path in site_packages(environment).iterdir()} - {"dependencies.pth"}
    assert installed == top_level


def test_the_wheel_holds_every_module_and_stub_and_no_results(wheel: Path) -> None:
    linked = {"server": "bigmodel/server", "benchmarks": "bigmodel/benchmarks", "bigmodel": "bigmodel"}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in linked.items()
        for pattern in ("*.py", "*.pyi", "py.typed", "*.html")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert {name for name in names(wheel) if ".dist-info/" not in name} == expected


@pytest.mark.long
def test_the_source_archive_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path)) as file:
        assert not [member.name for member in file if member.issym() or member.islnk()]
        file.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert names(build_wheel(unpacked, tmp_path)) == names(wheel)


def test_the_command_is_installed(environment: Path) -> None:
    command = [environment / "bin" / "bigmodel", "--help"]
    assert "serve" in subprocess.run(command, env=outside(), capture_output=True, text=True, check=True).stdout


@pytest.mark.long
@pytest.mark.slow
def test_the_installed_package_has_its_names_and_commands(environment: Path, used: Used, checkpoint: Path) -> None:
    """One test, as the process takes seconds to start: several could be run by workers that start one each."""
    found = used.found
    assert all(path.startswith(str(site_packages(environment))) for path in found["imported"])
    assert len(found["names"]) > 50
    assert not [name for name, is_there in found["names"].items() if not is_there]
    assert {part["device"] for part in json.loads(found["plan"])["parts"]} == {"cpu"}
    assert "tokens/s" in found["generate"]
    assert "cpu" in found["bench"]
    assert [name.partition("-")[0] for name in found["kept"]] == ["host_kernels"]
    address = used.address()
    assert "<html" in get(address).decode()
    body = {"model": checkpoint.name, "prompt": "the", "max_tokens": 4}
    answer = json.loads(get(f"{address}/v1/completions", json.dumps(body).encode()))
    assert answer["usage"]["completion_tokens"] <= 4


def is_ready(address: str) -> bool:
    """Whether the server at `address` has loaded its model."""
    try:
        get(f"{address}/ready")
    except urllib.error.URLError:
        return False
    return True


def get(address: str, body: bytes | None = None) -> bytes:
    """What the server answers at `address`."""
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())

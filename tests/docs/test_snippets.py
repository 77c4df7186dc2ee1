"""Every snippet of the guide and the README runs, prints what the page shows, and draws the figures that it names.

`UPDATE_DOCS=1 pytest -m '' tests/docs` writes what was printed into the pages, and what was drawn into `docs/figures`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.examples import alike
from tests.ports import free_port
from tests.preloaded import run, write_commands

from .small_llama import save_small_llama
from .snippets import blocks, steps

ROOT = Path(__file__).resolve().parents[2]
LONG = [
    ROOT / "docs" / f"{name}.md"
    for name in ("concepts", "quickstart", "guides/offload", "guides/plan", "guides/serve", "guides/train")
]
LONG += [ROOT / "docs" / "guides" / "troubleshooting.md", ROOT / "README.md"]
"""Pages whose snippets take long: not all of these are run in every run."""
PAGES = [ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*LONG}), *LONG]
FIGURES = ROOT / "docs" / "figures"
PINNED = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]
LANGUAGES = {"python", "console", "text", "json", "yaml", "bash", "toml"}
MODULES = (
    "bigmodel.checkpoint",
    "bigmodel.cli.plan",
    "bigmodel.dispatch.pretrained",
    "bigmodel.server.http.run",
    "openai",
    "transformers.models.llama.modeling_llama",
)
"""What most pages import: the processes that run them are forked from one that has."""
ENVIRONMENT = re.compile(r"<!-- environment: (\w+)=(\S+) -->")


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that pages call `my-llama`."""
    folder = tmp_path_factory.mktemp("guide") / "my-llama"
    save_small_llama(folder)
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """The folder that a page is run in: the checkpoint, and programs that it calls."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "my-llama").symlink_to(checkpoint)
    write_commands(tmp_path / "bin", MODULES)
    return here


def environment(page: str, folder: Path) -> dict[str, str]:
    """The variables that a page's snippets run with."""
    path = os.pathsep.join([str(folder.parent / "bin"), os.environ["PATH"]])
    fixed = {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    as_readers_have_them = {name: value for name, value in os.environ.items() if name != "BIGMODEL_VIRTUAL_STRICT"}
    cache = {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    return as_readers_have_them | fixed | cache | dict(ENVIRONMENT.findall(page))


@pytest.mark.slow
@pytest.mark.timeout(400)
@alike("page", [page for page in PAGES if steps(page.read_text())], first=-len(LONG), ids=name)
def test_the_snippets_of_a_page_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    todo = steps(text)
    file = folder.parent / "steps.json"
    ports = {port: str(free_port()) for port in ("8000", "8001")}

    def with_ports(value: object) -> str:
        return re.sub("|".join(ports), lambda found: ports[found[0]], str(value))

    here = [{name: with_ports(value) for name, value in vars(step).items()} for step in todo]
    file.write_text(json.dumps(here))
    monkeypatch.chdir(folder)
    done = run(["-m", "tests.docs.snippets", file], environment(text, folder), modules=MODULES)
    assert done.returncode == 0, f"{name(page)}: {done.stderr[-3000:]}"
    printed = json.loads(file.read_text())
    if os.environ.get("UPDATE_DOCS"):
        for step, output in reversed(list(zip(todo, printed, strict=True))):
            if step.shown is not None:
                text = text[: step.span[0]] + output + text[step.span[1] :]
        page.write_text(text)
        for drawn in folder.glob("*.svg"):
            (FIGURES / drawn.name).write_bytes(drawn.read_bytes())
        return
    if Version(torch.__version__).base_version != PINNED:
        pytest.skip(f"it ran; what it shows was printed with PyTorch {PINNED}")
    for step, output in zip(todo, printed, strict=True):
        if step.shown is not None:
            assert output == step.shown, f"{name(page)}, line {step.line} prints something else"
    for drawn in folder.glob("*.svg"):
        assert drawn.read_bytes() == (FIGURES / drawn.name).read_bytes(), f"{name(page)} draws another {drawn.name}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_have_a_language_that_readers_and_tests_know(page: Path) -> None:
    text = page.read_text()
    assert {block.language for block in blocks(text)} <= LANGUAGES
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(text))


def test_every_public_name_is_in_the_api_pages() -> None:
    import bigmodel
    import bigmodel.server

    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(r"^::: bigmodel\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    errors = {name for name in bigmodel.__all__ if name.endswith("Error")}
    assert {*bigmodel.__all__, *bigmodel.server.__all__} - described - errors == set()


def test_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120

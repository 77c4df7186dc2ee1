"""Cells of a notebook that start processes, run in a real kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigmodel import __version__
from tests.preloaded import python_executable

pytestmark = pytest.mark.slow

DEFINE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from bigmodel import Accelerator, debug_launcher, notebook_launcher, set_seed

def train(epochs):
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in range(epochs):
        for [x] in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"{accelerator.num_processes} processes, {len(loader)} steps")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a kernel that has PyTorch imported when it starts."""
    folder = tmp_path_factory.mktemp("jupyter")
    (folder / "kernels" / "preloaded").mkdir(parents=True)
    command = [str(python_executable()), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "preloaded", "language": "python"}
    (folder / "kernels" / "preloaded" / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        yield "preloaded"


@pytest.fixture(scope="module")
def outputs(kernel: str) -> dict[str, str]:
    """What each cell prints, or the error it ends with."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, which runs notebooks")
    pytest.importorskip("ipykernel", reason="needs ipykernel, the kernel of notebooks")
    nbformat: Any = pytest.importorskip("nbformat")
    cells = {
        "define": DEFINE,
        "alone": "notebook_launcher(train, (1,), num_processes=1, cpu=True)",
        "backward": "torch.ones(3, requires_grad=True).sum().backward()",
        "together": "notebook_launcher(train, (1,), num_processes=2, use_port=0, cpu=True)",
        "failing": "def broken():\n    raise ValueError('in this cell')\ndebug_launcher(broken)",
        "afterwards": "debug_launcher(train, (2,))",
        "fresh": "import sys\n"  # the kernel is forked from a process that other tests may have had import them
        "for name in [*sys.modules]:\n"
        "    if name.partition('.')[0] in ('accelerate', 'transformers', 'peft', 'diffusers'):\n"
        "        del sys.modules[name]",
        "extension": "%load_ext bigmodel.compat\nimport accelerate, bigmodel.hooks\nfrom accelerate import hooks\n"
        "print(accelerate.__version__, hooks is bigmodel.hooks)",
        "too late": "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != 'StandIn']\n"
        "%reload_ext bigmodel.compat",
    }
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells.values()])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    nbclient.NotebookClient(notebook, timeout=60, kernel_name=kernel, allow_errors=True).execute(env=environment)
    return {
        name: "".join(each.get("text", each.get("evalue", "")) for each in cell.outputs)
        for name, cell in zip(cells, notebook.cells)
    }


def test_one_process_trains_in_the_kernel(outputs: dict[str, str]) -> None:
    assert "1 processes, 4 steps" in outputs["alone"]


def test_a_function_of_a_cell_trains_on_two_processes(outputs: dict[str, str]) -> None:
    assert "2 processes, 2 steps" in outputs["together"]
    assert "2 processes, 2 steps" in outputs["afterwards"]


def test_a_cell_that_fails_says_why(outputs: dict[str, str]) -> None:
    assert outputs["failing"].rstrip().endswith("ValueError: in this cell")
    assert "Process" in outputs["failing"]


def test_the_extension_has_accelerate_be_this_package(outputs: dict[str, str]) -> None:
    assert outputs["extension"].split() == [f"1.15.0+bigmodel.{__version__}", "True"]


def test_the_extension_is_refused_where_it_comes_too_late(outputs: dict[str, str]) -> None:
    assert "accelerate is imported already" in outputs["too late"]

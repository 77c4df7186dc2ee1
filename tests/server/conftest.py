"""One live server over the tiny model for all tests that do not change it; processes and engines that start quickly."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from bigmodel.server.engine import build
from bigmodel.server.engine.compute import choose_runner, host_linear, runner
from bigmodel.server.engine.compute.choose_runner import RunnerChoice
from bigmodel.server.engine.compute.runner import Runner
from tests.equal_models import description, named_tensors, placed_description
from tests.preloaded import python_executable
from tests.server.live import serving, tiny_app


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What asynchronous tests run on."""
    return "asyncio"


@pytest.fixture(scope="session")
def app() -> Any:
    return tiny_app()


@pytest.fixture(scope="session")
def url(app: Any) -> Iterator[str]:
    with serving(app) as address:
        yield address


class Preloaded:
    """Has the name of the module `sys` that starts processes: an interpreter that has imported what they need."""

    @property
    def executable(self) -> str:
        return str(python_executable("xgrammar"))


@pytest.fixture(scope="session", autouse=True)
def preloaded_workers() -> Iterator[None]:
    """Processes that compile grammars or tokenise are forked from one that has imported their libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bigmodel.server.forked.sys", Preloaded())
        yield


@pytest.fixture(scope="session", autouse=True)
def rows_are_probed_once() -> Iterator[None]:
    """Engines over layers of the same shapes have the same row multiple: a hundred products of each shape tell it.

    `tests/server/engine/compute/test_host_linear.py` tests the probe itself.
    """
    found: dict[Any, int] = {}

    def probe(model: torch.nn.Module, device: torch.device, linear: host_linear.Linear) -> int:
        linears = [module for module in model.modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
        kinds = frozenset(_kind(module.weight) for module in linears)
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)  # layers of its size are left out
        key = (kinds, vocabulary, device.type, linear, torch.get_num_threads())
        if key not in found:
            found[key] = host_linear.probe_row_multiple(model, device, linear)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "probe_row_multiple", probe)
        yield


@pytest.fixture(scope="session", autouse=True)
def runners_are_chosen_once() -> Iterator[None]:
    """Engines over equal models with equal weights, dispatched by equal plans if they are, have the same runner: the
    first of them finds it by forwards.

    `tests/server/engine/compute/test_choose_runner.py` tests the choice itself.
    """
    found: dict[Hashable, RunnerChoice] = {}

    def choose(model: torch.nn.Module, *, known: RunnerChoice | None = None, **options: Any) -> Runner:
        described = description(model) or placed_description(model)
        if known is not None or described is None:
            return choose_runner.choose_runner(model, known=known, **options)
        with torch.no_grad():
            weights = tuple((_kind(tensor), float(tensor.double().sum())) for tensor in named_tensors(model).values())
        key = (described, weights, *options.items())
        runner = choose_runner.choose_runner(model, known=found.get(key), **options)
        found[key] = RunnerChoice.of(runner)
        return runner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose_runner", choose)
        yield


def _kind(weight: torch.Tensor) -> tuple[object, ...]:
    """What kernels are chosen by; libraries look at addresses, too."""
    address = weight.data_ptr() % 64 if weight.device.type == "cpu" else 0
    return weight.shape, weight.stride(), weight.dtype, weight.device.type, address

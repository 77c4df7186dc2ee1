"""A plugin of pytest that runs transformers' own tests under the stand-in, on virtual accelerators or on the CPU alone.

It is imported by its own name: transformers' tests are a package ``tests`` themselves.

With ``TRANSFORMERS_TEST_DEVICE=virtual`` there are two virtual accelerators, so that the cases for one and for several
accelerators run. With ``cpu`` those cases of offload run that need none: what they allow accelerator 0 is allowed the
host, and the rest of a model lies on disk.

The tests may be of an older version than the one that is installed: names that it no longer has fail where they are
called, and not where a file of tests imports them.

Two helpers of transformers' tests are replaced. `check_device_map_is_respected` expects offloaded parameters on meta:
here they are real tensors on the host. ``distributed_testing_utils``, which transformers' source distribution leaves
out, starts processes on several GPUs; a case that calls it fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

import bigmodel.compat
from bigmodel.devices import virtual

ACCELERATORS = 2
DEVICE = os.environ["TRANSFORMERS_TEST_DEVICE"]

bigmodel.compat.install()
if DEVICE == "virtual":
    virtual.enable(count=ACCELERATORS)

import torch  # noqa: E402 (after installing)
from transformers import PreTrainedModel, testing_utils  # noqa: E402

if DEVICE == "virtual":
    testing_utils.BACKEND_DEVICE_COUNT[DEVICE] = lambda: ACCELERATORS
    testing_utils.BACKEND_MANUAL_SEED[DEVICE] = torch.manual_seed


GONE = ("DataCollatorForWholeWordMask", "GlueDataset", "GlueDataTrainingArguments")
"""Names that files of tests import of transformers, and that version 5.23 does not have."""


def refused(name: str, where: str) -> Callable[..., Any]:
    """Return a function that raises NotImplementedError."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not in {where}")

    return call


class LeftOut(ModuleType):
    """A module of which every name is a function that raises NotImplementedError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(name, "the source distribution")


for gone in GONE:
    if not hasattr(sys.modules["transformers"], gone):
        setattr(sys.modules["transformers"], gone, refused(gone, "the installed version of transformers"))
sys.modules.setdefault("tests.distributed_testing_utils", LeftOut("tests.distributed_testing_utils"))


def host_for_accelerator(from_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Return `from_pretrained` with the budget of accelerator 0 given to the host, which is all there is but disk."""

    @wraps(from_pretrained)
    def loaded(cls: Any, *args: Any, max_memory: Mapping[Any, int] | None = None, **kwargs: Any) -> Any:
        if max_memory is not None:
            kwargs["max_memory"] = {"cpu": max_memory[0]}
        return from_pretrained(cls, *args, **kwargs)

    return loaded


if DEVICE == "cpu" and os.environ.get("OFFLOAD_CASES"):
    testing_utils.require_torch_accelerator = lambda case: case
    PreTrainedModel.from_pretrained = classmethod(host_for_accelerator(PreTrainedModel.from_pretrained.__func__))  # type: ignore[assignment]


def check_device_map_is_respected(self: Any, model: torch.nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that parameters are where the map has them; offloaded ones are real tensors on the host."""
    for name, parameter in model.named_parameters():
        owner = name
        while owner not in device_map and owner:
            owner = owner.rpartition(".")[0]
        place = device_map[owner]
        expected = torch.device("cpu" if place in ("cpu", "disk") else f"{DEVICE}:{place}")
        assert parameter.device == expected, f"{name} is on {parameter.device}, not on {expected}"


def pytest_collection_modifyitems() -> None:
    """Replace the helper, once test files are imported."""
    common = sys.modules.get("tests.test_modeling_common")
    if common is not None:
        common.ModelTesterMixin.check_device_map_is_respected = check_device_map_is_respected  # type: ignore[attr-defined]

"""A plugin of pytest that runs accelerate's own tests under the stand-in.

Their helpers, the package ``accelerate.test_utils``, are part of accelerate's source: they are executed from there,
over this project's modules. The environment variable ``ACCELERATE_SOURCE`` names the folder.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from bigmodel.compat import install
from bigmodel.compat.pytest_plugin import pytest_report_header as pytest_report_header


def provide_helpers(source: Path) -> None:
    """Make ``accelerate.test_utils`` the package in accelerate's source."""
    import accelerate

    folder = source / "src" / "accelerate" / "test_utils"
    name = "accelerate.test_utils"
    spec = spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    accelerate.test_utils = module
    spec.loader.exec_module(module)


def pytest_runtest_setup() -> None:
    """Seed random numbers: tests draw weights twice and fail where their sums differ by less than 1e-3 by chance."""
    torch.manual_seed(0)


install()
provide_helpers(Path(os.environ["ACCELERATE_SOURCE"]))

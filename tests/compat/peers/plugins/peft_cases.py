"""A plugin of pytest that runs peft's own tests of offloading under the stand-in, on a virtual accelerator.

It is imported by its own name: peft's tests are a package ``tests`` themselves. Their helpers ask those of accelerate's
tests which device there is; the environment variable ``ACCELERATE_SOURCE`` names the folder of accelerate's source.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import bigmodel.compat
from bigmodel.devices import virtual

bigmodel.compat.install()
virtual.enable(count=1)

import accelerate  # noqa: E402 (after installing)


def provide_helpers(source: Path) -> None:
    """Make ``accelerate.test_utils`` the package in accelerate's source, and let it find the virtual accelerator."""
    folder = source / "src" / "accelerate" / "test_utils"
    spec = spec_from_file_location(
        "accelerate.test_utils", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = accelerate.test_utils = module
    spec.loader.exec_module(module)
    module.testing.get_backend = lambda: ("virtual", 1, lambda: 0)


provide_helpers(Path(os.environ["ACCELERATE_SOURCE"]))

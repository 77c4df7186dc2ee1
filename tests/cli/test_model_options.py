from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from bigmodel.cli import model_options
from bigmodel.cli.generate import generate
from bigmodel.cli.plan import plan
from bigmodel.cli.serve import serve
from bigmodel.cli.verify import verify

SHARED = {
    "model": model_options.Model,
    "max_memory": model_options.Budgets,
    "dtype": model_options.DType,
    "offload_dtype": model_options.OffloadDType,
    "host_kernels": model_options.HostKernels,
    "revision": model_options.Revision,
}


@pytest.mark.parametrize("command", [generate, plan, serve, verify])
def test_an_option_of_one_name_is_the_same_in_every_command(command: Any) -> None:
    hints = get_type_hints(command, include_extras=True)
    assert {"models" if command is serve else "model", "max_memory", "dtype"} <= hints.keys()
    for name in SHARED.keys() & hints.keys():
        assert hints[name] == SHARED[name]

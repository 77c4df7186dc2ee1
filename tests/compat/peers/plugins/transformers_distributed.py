"""A plugin of pytest that runs transformers' cases of the Trainer on two processes with the processes on the CPU."""

from __future__ import annotations

import bigmodel.compat

bigmodel.compat.install()

from transformers import testing_utils  # noqa: E402 (after installing)

PROCESSES = 2

testing_utils.require_torch_multi_accelerator = lambda case: case
testing_utils.BACKEND_DEVICE_COUNT["cpu"] = lambda: PROCESSES

"""Running a tracker with its real library, without a network, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.train.multiprocess import run_script

_SCRIPT = """
import json, sys
import numpy as np
from bigmodel.train import Accelerator
name, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={name: options})
accelerator.log({"train_loss": 0.5, "group": {"a": 1.5}, "note": "hello"}, step=7)
tracker = accelerator.get_tracker(name)
image = np.zeros((4, 4, 3), dtype=np.uint8)
tracker.log_images({"sample": [image, image]}, step=7)
if name != "dvclive":
    tracker.log_table("table", ["x", "y"], [[1, "b"]], step=7)
accelerator.end_training()
"""


def log_a_run(name: str, folder: Path, options: dict[str, Any], **variables: str) -> None:
    """Log a configuration, numbers, a text, images and a table; raise AssertionError unless that process succeeds.

    These libraries patch others when they are imported, and leave threads: hence a process of its own.
    """
    run_script(["-c", _SCRIPT, name, folder, json.dumps(options)], **variables)

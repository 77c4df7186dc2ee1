"""The error of a process that failed is this project's and torch's at once."""

from __future__ import annotations

import json
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bigmodel.errors import LaunchError
from bigmodel.launch.failure import ProcessFailedError


def test_it_is_a_launch_error_and_torchs_own(tmp_path: Path) -> None:
    told = {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback: ValueError: no", "timestamp": "1"}}
    (tmp_path / "error.json").write_text(json.dumps({"message": told}))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    error = ProcessFailedError(ChildFailedError("train", {3: failure}))
    assert isinstance(error, LaunchError)
    assert isinstance(error, ChildFailedError)
    assert str(error) == "Process 3 failed:\nTraceback: ValueError: no"
    assert error.get_first_failure() == (3, failure)

"""DeepSpeed's files are read without running what is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.errors import CheckpointFormatError
from bigmodel.train.strategies.deepspeed.files import safe_checkpoint_engine


class Evil:
    def __reduce__(self) -> Any:
        return os.getenv, ("HOME",)


def test_files_with_code_in_them_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install bigmodel[deepspeed]")
    torch.save({"module": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointFormatError, match=r"evil.pt holds objects of os\.getenv"):
        safe_checkpoint_engine().load(str(tmp_path / "evil.pt"))
    torch.save({"module": {"weight": torch.ones(2)}, "step": 3}, tmp_path / "good.pt")
    assert safe_checkpoint_engine().load(str(tmp_path / "good.pt"))["step"] == 3

"""What a model lets go of is not found in the page cache again."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.harness.evict_behind import evicting_behind
from bigmodel.benchmarks.harness.pagecache import cached_bytes
from bigmodel.checkpoint import Checkpoint
from bigmodel.dispatch.mapped import mapped_block
from bigmodel.dispatch.mapped.mapped_block import MappedBlock, Owner
from bigmodel.dispatch.transfer.files import SourceFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: mincore and posix_fadvise")


def dropped(path: Path) -> None:
    """Read a mapped weight and let go of it."""
    registry: dict[str, torch.Tensor | None] = {"weight": Checkpoint.open(path).tensor("weight")}
    block = MappedBlock("block", [Owner(registry, "weight")], SourceFiles())
    assert registry["weight"] is not None
    assert registry["weight"].sum() == 2**20
    assert block.drop() == 2**22


@pytest.fixture
def shard(workdir: Path) -> Path:
    """A written file of four MiB."""
    path = workdir / "model.safetensors"
    save_file({"weight": torch.ones(2**20)}, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path


def test_what_a_block_drops_leaves_the_page_cache(shard: Path) -> None:
    dropped(shard)
    assert cached_bytes(shard) > 2**21
    with evicting_behind():
        dropped(shard)
    assert cached_bytes(shard) < 2**20


def test_what_cannot_be_thrown_out_is_told(shard: Path, tmp_path: Path) -> None:
    gone = shutil.copy(shard, tmp_path)

    def drop_what_has_gone() -> None:
        with evicting_behind():
            weight = Checkpoint.open(gone).tensor("weight")
            os.unlink(gone)
            mapped_block.release(weight)

    with pytest.raises(BenchmarkError, match="may have stayed"):
        drop_what_has_gone()


def test_afterwards_nothing_is_thrown_out_and_no_thread_is_left(shard: Path) -> None:
    with evicting_behind():
        pass
    assert all(thread.name != "evict behind" for thread in threading.enumerate())
    dropped(shard)
    assert cached_bytes(shard) > 2**21

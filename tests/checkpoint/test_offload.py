from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.checkpoint import mapped_region
from bigmodel.checkpoint.offload import offload
from bigmodel.checkpoint.write import Outgoing
from tests.checkpoint.helpers import DTYPES, assert_same, maps_of, random_tensor


def test_what_is_offloaded_is_mapped_and_its_file_has_no_name(tmp_path: Path) -> None:
    tensors = {str(dtype): random_tensor(dtype, (3, 4), seed=1) for dtype in DTYPES}
    folder = tmp_path / "new" / "folder"
    views = offload(folder, [Outgoing.of(name, tensor) for name, tensor in tensors.items()])
    assert_same(views, tensors)
    assert list(folder.iterdir()) == []
    for view in views.values():
        region = mapped_region(view)
        assert region is not None
        assert region.open() is None
    assert maps_of(folder) == 1
    del view, views
    assert maps_of(folder) == 0


def test_two_models_in_one_folder_never_meet(tmp_path: Path) -> None:
    first = offload(tmp_path, [Outgoing.of("w", torch.zeros(4))])
    second = offload(tmp_path, [Outgoing.of("w", torch.ones(4))])
    assert first["w"].sum() == 0
    assert second["w"].sum() == 4


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offload(tmp_path, [Outgoing("w", torch.float32, (4,), fail)])
    assert list(tmp_path.iterdir()) == []

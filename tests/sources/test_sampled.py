"""A sample of a mixture's headers gives the bytes of all its tensors, or there is none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.sources.headers import read_header
from bigmodel.sources.sampled import sample_headers


def experts(count: int, *, layers: int = 2, rows: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.experts.{expert}.{leaf}": torch.zeros(rows, 2, dtype=dtype)
        for layer in range(layers)
        for expert in range(count)
        for leaf, dtype in (("weight", torch.int8), ("weight_scale", torch.float32))
    }


def written(folder: Path, *shards: Mapping[str, torch.Tensor]) -> list[Path]:
    paths = [folder / f"{number}.safetensors" for number, _ in enumerate(shards)]
    for path, shard in zip(paths, shards, strict=True):
        save_file(dict(shard), path, metadata={"format": "pt"})
    return paths


def test_one_expert_stands_for_all(tmp_path: Path) -> None:
    tensors = {**experts(12), "layers.0.shared_experts.weight": torch.zeros(3), "norm": torch.zeros(5)}
    names = sorted(tensors)
    paths = written(tmp_path, {n: tensors[n] for n in names[:20]}, {n: tensors[n] for n in names[20:]})
    found = sample_headers(paths)
    assert found is not None
    assert found.experts == 12
    assert {name.split(".")[3] for name in found.entries if ".experts." in name} == {"0"}
    assert found.entries.keys() >= {"layers.0.shared_experts.weight", "norm"}
    whole = {name: entry for path in paths for name, entry in read_header(path).items()}
    for name, entry in found.entries.items():
        assert (entry.dtype, entry.shape, entry.nbytes) == (
            whole[name].dtype,
            whole[name].shape,
            whole[name].nbytes,
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"layers.1.experts.3.weight": torch.zeros(5, 2, dtype=torch.int8)},
        {"layers.1.experts.3.weight": torch.zeros(4, 2, dtype=torch.int16)},
        {"layers.1.experts.4.weight": torch.zeros(4, 2, dtype=torch.int8)},
        {"layers.1.experts.gate_up_proj": torch.zeros(4)},
        {"odd},{": torch.zeros(1)},
    ],
    ids=["another shape", "another dtype", "one more", "fused ones beside", "a key with braces"],
)
def test_where_experts_differ_there_is_no_sample(changed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert sample_headers(written(tmp_path, experts(4))) is not None
    assert sample_headers(written(tmp_path, {**experts(4), **changed})) is None


def test_there_is_none_of_a_dense_model_or_of_a_damaged_file(tmp_path: Path) -> None:
    assert sample_headers(written(tmp_path, {"layers.0.weight": torch.zeros(2)})) is None
    path = written(tmp_path, experts(4))[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert sample_headers([path]) is None
    path.write_bytes(b"12345")
    assert sample_headers([path]) is None

"""What the tests of the checkpoint room share: models, checkpoints, and views on the process."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


class Tied(nn.Module):
    """A language model in small: the head is the embedding; one buffer is saved, one is not."""

    def __init__(self, width: int = 4, words: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 2.0))
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.arange(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(self.norm(hidden))


def on_meta(model: nn.Module) -> nn.Module:
    """`model` with every parameter and saved buffer on meta, ties kept, as `init_empty_weights` makes them."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[key] = moved.setdefault(id(parameter), empty)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                module._buffers[key] = buffer.to("meta")
    return model


def save_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> Path:
    """Write `tensors` round robin to `shards` files with an index, by the reference writer."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for i, (name, tensor) in enumerate(tensors.items()):
        parts[i % shards][name] = tensor
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of `model` without second names of one tensor."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().clone()
    return tensors


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; NaNs count as what they are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Both hold the same tensors, bit by bit."""
    assert set(actual) == set(expected)
    assert [name for name in expected if not same_bits(actual[name], expected[name])] == []


def maps_of(path: Path) -> int:
    """How many memory maps of files below `path` this process has."""
    gc.collect()
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors_of(path: Path) -> int:
    """How many files below `path` this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and str(path) in os.readlink(link) for link in links)


def snapshot(model: nn.Module) -> dict[str, tuple[int, int, str]]:
    """What a failed load must leave as it was: which object each name is, its version, and its device."""
    items: Iterable[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: (id(tensor), tensor._version, str(tensor.device)) for name, tensor in items}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bytes at all as a tensor: NaNs and denormals included; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


_NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)
_TENSORS = st.builds(
    random_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 2**31),
)


def state_dicts() -> st.SearchStrategy[dict[str, torch.Tensor]]:
    """State dicts of a few tensors of any dtype and shape, 0-d and empty ones included, under nested names."""
    return st.dictionaries(_NAMES, _TENSORS, min_size=1, max_size=6)


class Holder(nn.Module):
    """A module whose state dict is exactly what it was made of; floating-point tensors are parameters."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                # A module and a tensor may bear the same name in different places of the tree, not in one.
                part = f"{part}_"
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if tensor.is_floating_point() or tensor.is_complex():
                module.register_parameter(leaf, nn.Parameter(empty))
            else:
                module.register_buffer(leaf, empty)


def holder_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under the names they have in a `Holder`."""
    return {".".join([*(f"{p}_" for p in n.split(".")[:-1]), n.split(".")[-1]]): t for n, t in tensors.items()}


def readers() -> set[threading.Thread]:
    """Return the threads that read checkpoints; other tests may have left some of other kinds."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-read")}

"""Methods beside ``forward`` by which a model computes with its parts are planned as they run."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.plan.memory.assignment import Assignment, assemble
from bigmodel.profile import profile_model

from ..examples import alike
from .models import resident_output

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH, CODE = 64, 256
X = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))


class Codec(nn.Module):
    """Encodes and decodes, and has a forward too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, CODE), nn.Linear(CODE, WIDTH)
        self.scale = nn.Parameter(torch.full((CODE,), 0.5))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu() * self.scale

    def decode(self, codes: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return self.down(F.gelu(codes)) + shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


class Quantizer(nn.Module):
    """Encodes by one codec after the other, and adds up what they decode: the parent calls no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codecs = nn.ModuleList(Codec() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = [codec.encode(x) for codec in self.codecs]
        made = torch.zeros_like(x)
        for codec, each in zip(self.codecs, codes):
            made = made + codec.decode(each, shift=0.5)
        return made


class Both(Quantizer):
    """Calls forwards and methods of the same parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for codec in self.codecs:
            x = codec(x) + codec.decode(codec.encode(x))
        return x


class Autoencoder(nn.Module):
    """Keeps several codes while it decodes the first, and reads the code's device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.codecs = nn.ModuleList(Codec() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        codes = self.codecs[0].encode(x)
        codes = codes + torch.ones(codes.shape, device=codes.device)
        return self.inner(self.codecs[3].decode(codes=codes) + self.codecs[1].decode(codes) + self.codecs[2](x))


class Handing(nn.Module):
    """Its parts' methods return several tensors, one of them as it was given."""

    class Part(Codec):
        def split(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"made": [self.up(x)], "given": [x]}

        def join(self, pieces: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return self.down(pieces["made"][0]) + pieces["given"][0]

    def __init__(self) -> None:
        super().__init__()
        self.codecs = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for codec in self.codecs:
            x = codec.join(codec.split(x)) + x
        return x


class Recurrent(nn.Module):
    """A function of its parts' methods reads several weights in several operations: all are copied before it runs."""

    class Part(Codec):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return super().encode(self.rnn(x)[0])

    def __init__(self) -> None:
        super().__init__()
        self.codecs = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for codec in self.codecs:
            x = codec.decode(codec.encode(x)) + x
        return x


def peaks(kind: type[nn.Module], places: list[tuple[object, object]], folder: Path) -> tuple[dict[int, int], ...]:
    """Run a model whose codecs lie and run at `places`, which must not change its output.

    Returns:
        The most bytes that it took of each accelerator, and those that were planned.
    """
    torch.manual_seed(0)
    model = kind().eval()
    expected = resident_output(model, X).cpu()
    profile = profile_model(model, sample_inputs=(X,), device_type="virtual")
    left = iter(places)
    where = [next(left) if unit.class_name in ("Codec", "Part") else (0, 0) for unit in profile.units]
    storage, execution = tuple(one for one, _ in where), tuple(other for _, other in where)
    streamed = {index for index, (one, other) in enumerate(where) if one != other}
    slot = max([profile.units[index].slot_bytes() for index in streamed], default=0)
    by = assemble(profile, Assignment(storage, execution, 0, 1 if streamed else 0, slot), {}, "by hand")  # type: ignore[arg-type]
    gc.collect()
    before = [memory_allocated(index) for index in range(2)]
    dispatch_model(model, by, offload_dir=folder)
    for index in range(2):
        reset_peak_memory(index)
    with torch.inference_mode():
        output = model(X.to("virtual:0"))
    measured = {index: max_memory_allocated(index) - before[index] for index in range(2)}
    assert torch.equal(output.cpu(), expected)
    return measured, {index: by.devices[index].total if index in by.devices else 0 for index in range(2)}


PLACES: dict[str, list[tuple[object, object]]] = {
    "one": [(0, 0)] * 4,
    "other": [(1, 1)] * 4,
    "by turns": [(0, 0), (1, 1), (0, 0), (1, 1)],
    "RAM": [("cpu", 0)] * 4,
    "RAM to the other": [("cpu", 1)] * 4,
    "disk": [("disk", 0)] * 4,
    "host": [("cpu", "cpu")] * 4,
    "all": [("cpu", 0), (1, 1), ("cpu", "cpu"), ("disk", 1)],
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", [Quantizer, Both, Autoencoder])
def test_what_methods_of_parts_take_is_planned(kind: type[nn.Module], places: str, tmp_path: Path) -> None:
    measured, planned = peaks(kind, PLACES[places], tmp_path)
    assert measured == planned


@pytest.mark.slow
@alike("places", ["RAM to the other", "disk", "RAM", "by turns", "other", "one"], first=1)
def test_all_weights_of_a_function_are_copied_to_where_it_runs_for_as_long_as_it_does(
    places: str, tmp_path: Path
) -> None:
    measured, planned = peaks(Recurrent, PLACES[places], tmp_path)
    assert measured == planned


@pytest.mark.parametrize("places", PLACES)
def test_an_input_that_a_method_returns_counts_beside_its_copy_for_as_long_as_either_is_held(
    places: str, tmp_path: Path
) -> None:
    measured, planned = peaks(Handing, PLACES[places], tmp_path)
    assert all(planned[index] - X.nbytes <= measured[index] <= planned[index] for index in range(2))

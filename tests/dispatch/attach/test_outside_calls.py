"""Children that are called from outside their unit's forward get their inputs where their weights are."""

from __future__ import annotations

import copy
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.attached_forward import AttachedForward
from bigmodel.errors import DeviceMapError
from bigmodel.plan import make_plan

from ...accelerators import at, exact, two
from ..models import Block, llama

pytestmark = pytest.mark.usefixtures("every_accelerator")

WIDTH = 8


class Attention(nn.Module):
    """Attention with a container, whose parts are called one by one, as those of diffusion models have."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.softmax(self.to_q(x), -1)
        for module in self.to_out:
            x = module(x)
        return x


class DiffusionBlock(nn.Module):
    """A block whose parts and second method its model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm = nn.ModuleDict({"emb": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})
        self.attn = Attention()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm["norm"](x) * self.scale + self.norm["emb"](time))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(self.norm["norm"](x))


class Diffusion(nn.Module):
    """Calls its blocks' parts beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(3))
        self.proj_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = x * 2
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x, time)
        return self.proj_out(x * self.blocks[0].norm["emb"](time) + self.blocks[2].norm["emb"](time))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2].encode(self.blocks[1].encode(self.proj_in(x)))


MAPS: list[Any] = [
    {"": "cpu"},
    {"": "disk"},
    {"": 0, "blocks.1": "cpu", "blocks.2": "disk"},
    pytest.param({"": 0, "blocks.1": 1, "blocks.2": 1, "proj_out": 1}, marks=two),
    pytest.param({"": 1, "blocks.1": 0, "blocks.2": "cpu"}, marks=two),
    pytest.param({"": 0, "blocks.1.norm": 1, "blocks.2.attn": 1}, marks=two),
    pytest.param({"": 0, "blocks.1.attn.to_out": 1, "blocks.2.attn.to_out.1.0": "cpu"}, marks=two),
]


def diffusion() -> Diffusion:
    torch.manual_seed(0)
    return Diffusion().eval()


@pytest.mark.parametrize("offload", ["stream", "compute"])
@pytest.mark.parametrize("device_map", MAPS)
def test_a_part_of_a_block_may_be_called_by_the_model(
    device_map: dict[str, object], offload: str, tmp_path: Path
) -> None:
    model, x = diffusion(), torch.randn(2, WIDTH)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, device_map, main_device=at(0), offload_dir=tmp_path, offload=offload)
    with torch.no_grad():
        for _ in range(2):
            found, expected = model(x), resident(x.to(at(0))).cpu()
            if offload == "compute":  # in part on the host, which rounds as virtual accelerators do, and CUDA does not
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected)


class CallsPart(nn.Module):
    """Calls parts of its last block after its blocks, as DiT does."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.blocks[-1].down(self.blocks[-1].up(x))


@pytest.mark.slow
@exact
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_of_a_part_that_the_model_calls_are_planned(place: str, tmp_path: Path) -> None:
    model, x = CallsPart().eval(), torch.randn(2, 32)
    whole = make_plan(model, {0: 2**40, "cpu": 2**40}, sample_inputs=(x,))
    blocks = sum(weight.nbytes for weight in model.parameters())
    others = {"cpu": 2**40} if place == "cpu" else {"cpu": 0}
    plan = make_plan(model, {0: whole.devices[0].total - blocks // 2, **others}, sample_inputs=(x,))
    assert "blocks.7" in [part.name for part in plan.streamed]
    inputs = x.to(at(0))
    gc.collect()
    before = memory_allocated(at(0)) - inputs.nbytes
    dispatch_model(model, plan, offload_dir=tmp_path)
    reset_peak_memory(at(0))
    with torch.no_grad():
        model(inputs)
    assert max_memory_allocated(at(0)) - before == plan.devices[0].total


@pytest.mark.usefixtures("every_accelerator")
def test_threads_may_share_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    detach = AttachedForward.detach

    def slowly(attached: AttachedForward) -> None:
        time.sleep(1e-3)  # has the threads meet in what follows a forward
        detach(attached)

    model, x = diffusion(), torch.randn(2, WIDTH)
    expected = model(x)
    meet, forward = threading.Barrier(4, timeout=60), model.forward
    monkeypatch.setattr(model, "forward", lambda x: (forward(x), meet.wait())[0])
    monkeypatch.setattr(AttachedForward, "detach", slowly)
    dispatch_model(model, {"": at(0), "blocks.1": "cpu"}, main_device=at(0), offload="compute")
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(model, [x] * 4))
    for output in outputs:
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("device_map", MAPS)
def test_a_second_method_of_model_and_blocks_is_an_entry_point(
    device_map: dict[str, object], warm: bool, tmp_path: Path
) -> None:
    model, x = diffusion(), torch.randn(2, WIDTH)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, device_map, main_device=at(0), offload_dir=tmp_path)
    with torch.no_grad():
        if warm:
            model(x)
        assert torch.equal(model.decode(x).cpu(), resident.decode(x.to(at(0))).cpu())
        assert torch.equal(model.decode(x.to(at(0))).cpu(), resident.decode(x.to(at(0))).cpu())


class Encoding(nn.Module):
    """Calls a method of its own in its forward, which returns more than is used, and may have a tensor of its own."""

    def __init__(self, has_tensor: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 128 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0)) if has_tensor else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.features(x)["pooled"])

    def features(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        every = self.encoder(x if self.scale is None else x * self.scale)
        return {"every": every, "pooled": every[:, :WIDTH].clone()}


@two
@exact
@pytest.mark.parametrize("has_tensor", [False, True])
def test_what_a_method_returns_to_the_model_itself_stays_where_it_is_and_comes_back_to_others(has_tensor: bool) -> None:
    torch.manual_seed(0)
    model, x = Encoding(has_tensor).eval(), torch.randn(64, WIDTH)
    expected, features = model(x), model.features(x)
    plan = make_plan(model, {0: 2**30}, sample_inputs=(x,))
    devices = {"encoder": 1}
    parts = [
        replace(
            part, device=devices.get(part.name, 0), runs_on=devices.get(part.name, 0), returns=part.name == "decoder"
        )
        for part in plan.parts
    ]
    dispatch_model(model, replace(plan, parts=tuple(parts)))
    inputs = x.to(at(0))
    reset_peak_memory(at(0))
    before = memory_allocated(at(0))
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).cpu(), expected)
        assert max_memory_allocated(at(0)) - before < features["every"].nbytes // 4
        found = model.features(inputs)
    assert {str(each.device) for each in found.values()} == {at(0)}
    torch.testing.assert_close({name: each.cpu() for name, each in found.items()}, features)


class Hidden(nn.Module):
    """Holds modules in a dict, where PyTorch does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.registered = {"b": self.b}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.registered["b"](self.a(x))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, pytest.param({"a": 0, "b": 1}, marks=two)])
def test_modules_may_be_called_through_a_dict(device_map: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, x = Hidden().eval(), torch.randn(2, WIDTH)
    expected = model(x)
    dispatch_model(model, device_map, main_device=at(0))
    with torch.no_grad():
        assert torch.allclose(model(x), expected)


class MultiHead(nn.Module):
    """PyTorch's attention, which computes with its child's weights, in a model without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.head(self.layer(self.attn(x, x, x, need_weights=False)[0]))


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": "disk"}, pytest.param({"": 0, "attn": 1, "layer": 1}, marks=two)]
)
def test_multi_head_attention_is_one_piece(device_map: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = MultiHead().eval(), torch.randn(2, 5, WIDTH)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, device_map, main_device=at(0), offload_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(x), resident(x.to(at(0))).cpu())


@two
def test_a_map_that_cuts_multi_head_attention_is_refused_before_anything_moves() -> None:
    model = MultiHead()
    with pytest.raises(DeviceMapError, match=r"'attn'.*MultiheadAttention.*map it whole"):
        dispatch_model(model, {"": 0, "attn.out_proj": 1})
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@two
def test_a_weight_on_another_accelerator_that_the_parent_uses_itself_is_brought() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.b(self.a(x)), self.b.weight)

    model, x = Tied(), torch.randn(2, WIDTH)
    expected = copy.deepcopy(model).to(at(0))(x.to(at(0)))
    assert torch.equal(dispatch_model(model, {"": 0, "b": 1})(x), expected.cpu())


@two
def test_parts_of_blocks_that_nobody_calls_from_outside_carry_nothing_after_the_first_forward() -> None:
    model = dispatch_model(llama(), {"": 0, "model.layers.2": 1, "model.layers.3": 1})
    model(torch.arange(4).view(1, 4))
    parts = [part for layer in model.model.layers for part in layer.modules() if part is not layer]
    assert not [part for part in parts if "forward" in part.__dict__]

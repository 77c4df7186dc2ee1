"""Remembered results of fake kernels are those that PyTorch derives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile.profile import profile_model
from bigmodel.profile.trace import fake_kernels
from bigmodel.profile.trace.fake_kernels import MOST, derive, forget_results, run_fake
from tests.examples import few

aten = torch.ops.aten


class Fake(TorchDispatchMode):
    """Runs operations by `run_fake`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_fake(func, args, kwargs or {})


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget_results()
    yield
    forget_results()


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operations that were derived, in order."""
    found: list[Any] = []

    def noting(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        found.append(func)
        return derive(func, args, kwargs)

    monkeypatch.setattr(fake_kernels, "derive", noting)
    return found


def described(tensor: torch.Tensor, arguments: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return all that a dry run reads of a result; memory is described by the argument that it is shared with."""
    storages = [each.untyped_storage()._cdata for each in arguments]
    storage = tensor.untyped_storage()
    shared = storages.index(storage._cdata) if storage._cdata in storages else None
    place = tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()
    return (*place, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference(), shared, type(tensor))


OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, y: aten.add.Tensor(x, y),
    lambda x, y: aten.add.Tensor(x, y, alpha=2),
    lambda x, y: aten.mul.Tensor(x, 2),
    lambda x, y: aten.mul.Tensor(x, 2.5),
    lambda x, y: aten.gt.Scalar(x, 0),
    lambda x, y: aten._to_copy.default(x, dtype=torch.float64),
    lambda x, y: aten.transpose.int(x, 0, 1),
    lambda x, y: aten.slice.Tensor(x, 1, 1, 3),
    lambda x, y: aten.select.int(x, 0, -1),
    lambda x, y: aten.expand.default(aten.unsqueeze.default(x, 0), [3, -1, -1]),
    lambda x, y: aten.detach.default(x),
    lambda x, y: aten.clone.default(aten.transpose.int(x, 0, 1), memory_format=torch.contiguous_format),
    lambda x, y: aten.cat.default([x, y], 1),
    lambda x, y: aten.mm.default(x, aten.t.default(y)),
    lambda x, y: aten.mean.dim(x, [-1], True),
    lambda x, y: aten.topk.default(x, 2),
    lambda x, y: aten.split.Tensor(x, 2, 1),
    lambda x, y: aten.unbind.int(x),
    lambda x, y: aten.var_mean.correction(x, [1]),
    lambda x, y: aten._softmax.default(x, -1, False),
    lambda x, y: aten.zeros_like.default(x),
    lambda x, y: aten.new_empty.default(x, [2, 2], dtype=torch.int8),
    lambda x, y: aten._unsafe_view.default(x, [-1]),
    lambda x, y: aten.view.default(x, [1, -1]),
    lambda x, y: aten.le.Tensor(x, y),
    lambda x, y: aten.le.Tensor(aten.t.default(x), aten.select.int(y, 1, 0)),
    lambda x, y: aten.bitwise_and.Tensor(aten.gt.Scalar(x, 0), aten.gt.Scalar(y, 0)),
    lambda x, y: aten.bitwise_not.default(aten.gt.Scalar(aten.t.default(x), 0)),
    lambda x, y: aten.cumsum.default(x, -1, dtype=torch.int32),
    lambda x, y: aten.cumsum.default(aten.t.default(x), 0),
    lambda x, y: aten.floor_divide.default(x, 2),
    lambda x, y: aten.floor_divide.default(aten._to_copy.default(aten.t.default(x), dtype=torch.int64), 2),
    lambda x, y: aten.gather.default(x, 1, aten._to_copy.default(y, dtype=torch.int64)),
    lambda x, y: aten.gather.default(aten.t.default(x), 1, aten._to_copy.default(aten.t.default(y), dtype=torch.int64)),
    lambda x, y: aten.masked_fill.Scalar(x, aten.gt.Scalar(y, 0), 1.0),
    lambda x, y: aten.masked_fill.Scalar(aten.t.default(x), aten.gt.Scalar(aten.t.default(y), 0), 1.0),
    lambda x, y: aten.sort.default(x),
    lambda x, y: aten.sort.default(aten.t.default(x), 0, True),
    lambda x, y: aten.topk.default(aten.t.default(x), 1, 0),
    lambda x, y: aten.where.self(aten.gt.Scalar(x, 0), x, y),
    lambda x, y: aten.where.self(aten.gt.Scalar(aten.t.default(x), 0), aten.t.default(x), aten.t.default(y)),
    lambda x, y: aten.mul.Scalar(aten.t.default(x), 2.0),
    lambda x, y: aten.new_ones.default(aten.t.default(x), [2, 3]),
    lambda x, y: aten.new_zeros.default(x, [3], dtype=torch.int64),
    lambda x, y: aten.zeros_like.default(aten.t.default(x), dtype=torch.int8),
    lambda x, y: aten.view.dtype(aten.new_zeros.default(x, [3, 4]), torch.uint8),
    lambda x, y: aten.mul_.Tensor(x, y),
    lambda x, y: aten.mul_.Tensor(aten.t.default(x), 2),
    lambda x, y: aten.div_.Tensor(x, aten.select.int(y, 0, 0)),
    lambda x, y: aten.sub_.Tensor(x, 1),
    lambda x, y: aten.copy_.default(x, aten._to_copy.default(y, dtype=torch.float64)),
    lambda x, y: aten.bitwise_and_.Scalar(aten._to_copy.default(x, dtype=torch.int32), 7),
    lambda x, y: aten.bitwise_left_shift_.Tensor_Scalar(aten._to_copy.default(x, dtype=torch.int32), 7),
    lambda x, y: aten.bitwise_or_.Tensor(
        aten._to_copy.default(x, dtype=torch.int32), aten._to_copy.default(y, dtype=torch.int32)
    ),
]


@pytest.mark.slow
@given(
    operation=st.sampled_from(OPERATIONS),
    rows=st.integers(1, 5),
    columns=st.integers(3, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    inference=st.booleans(),
)
@settings(max_examples=few(60), deadline=None)
def test_results_are_the_derived_ones_the_first_time_and_later(
    operation: Any, rows: int, columns: int, dtype: torch.dtype, inference: bool
) -> None:
    def run() -> list[Any]:
        x, y = (torch.empty(rows, columns, dtype=dtype) for _ in range(2))
        output = operation(x, y)
        sequence = type(output) if isinstance(output, (tuple, list)) else None
        return [sequence, *(described(each, [x, y]) for each in (output if sequence else [output]))]

    with torch.inference_mode(inference), FakeTensorMode(allow_non_fake_inputs=True):
        wanted = run()
        with Fake():
            assert run() == wanted
            assert run() == wanted


def test_the_same_shapes_are_derived_once_for_all_modes(derived: list[Any]) -> None:
    for _ in range(2):
        with FakeTensorMode():
            x = torch.empty(2, 3)
            with Fake():
                assert (x + x).fake_mode is x.fake_mode
    assert derived == [aten.add.Tensor]


def test_numbers_that_are_equal_and_of_several_types_give_several_dtypes() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, dtype=torch.int64)
        with Fake():
            assert [aten.add.Tensor(x, each).dtype for each in (1, 1.0, True)] == [
                torch.int64,
                torch.float32,
                torch.int64,
            ]


def test_the_default_dtype_is_followed() -> None:
    def dtype() -> torch.dtype:
        with FakeTensorMode():
            x = torch.empty(2, dtype=torch.int64)
            with Fake():
                return aten.true_divide.Tensor(x, x).dtype

    before = dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert (before, dtype()) == (torch.float32, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_depends_on_values_is_derived_each_time(derived: list[Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, mask = torch.empty(2, 3), torch.ones(2, dtype=torch.bool)
        with Fake():
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    x[mask]
    assert derived.count(aten.index.Tensor) == 2


def test_attention_is_derived_each_time_only_where_scores_are_dropped(derived: list[Any]) -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    for dropped in (0.0, 0.5):
        for _ in range(2):
            with FakeTensorMode():
                x = torch.empty(1, 2, 3, 8)
                with Fake():
                    assert attention(x, x, x, dropped)[0].shape == x.shape
    assert derived.count(attention) == 3


def test_operations_in_place_return_their_own_argument(derived: list[Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors, rows = [torch.empty(2, 3) for _ in range(3)], torch.ones(2, dtype=torch.int64)
        with Fake():
            for x in tensors:
                assert x.add_(1) is x
                assert aten.index_put_.default(x, [rows], x[rows]) is x
                assert aten.copy_.default(x, tensors[0]) is x
    computed = [func for func in derived if func.namespace == "aten"]
    assert computed == [aten.add_.Tensor, aten.index.Tensor, aten.index_put_.default, aten.copy_.default]


def test_an_output_that_an_operation_resizes_is_resized_each_time() -> None:
    with FakeTensorMode(), Fake():
        for _ in range(3):
            x, out = torch.empty(2, 3), torch.empty(0)
            assert aten.add.out(x, x, out=out) is out
            assert out.shape == (2, 3)


def test_tensors_made_from_none_are_remembered(derived: list[Any]) -> None:
    for _ in range(2):
        with FakeTensorMode() as mode, Fake():
            made = torch.empty(2, 3), torch.arange(4), torch.zeros(2, dtype=torch.bool, device="cpu")
            assert [(each.shape, each.dtype, each.fake_mode) for each in made] == [  # type: ignore[attr-defined]
                ((2, 3), torch.float32, mode),
                ((4,), torch.int64, mode),
                ((2,), torch.bool, mode),
            ]
    assert len(derived) == 3


def test_views_of_odd_strides_are_those_that_pytorch_derives() -> None:
    def strides() -> list[tuple[int, ...]]:
        wide = torch.empty(2, 3, 8)[:, :, ::2].unsqueeze(2)
        return [aten.view.default(wide, [2, 3, 1, 2, 2]).stride(), aten.view.default(wide, [6, 1, 4]).stride()]

    with FakeTensorMode():
        wanted = strides()
        with Fake():
            assert strides() == wanted


def test_results_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch, derived: list[Any]) -> None:
    assert MOST > 10_000
    monkeypatch.setattr(fake_kernels, "MOST", 3)
    with FakeTensorMode():
        x = torch.empty(2, 3)
        with Fake():
            for number in (1, 2, 3, 3, 4, 1):
                x + number
    assert len(derived) == 5


@pytest.mark.slow
def test_the_profile_of_a_mixture_is_that_of_derived_results(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(
            MixtralConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=64,
            )
        )
    first, second = (profile_model(model, context_length=24) for _ in range(2))
    monkeypatch.setattr("bigmodel.profile.trace.recorder.run_fake", lambda *call: derive(*call[:3]))
    derived = profile_model(model, context_length=24)
    assert first.phases == second.phases == derived.phases


class Recurrent(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(6, 8), kind(8, 16, num_layers=2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.before(x))[0]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_the_peak_of_recurrent_layers_is_predicted_to_the_byte(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    model, x = Recurrent(kind, **options).eval(), torch.randn(5, 3, 6)
    profile = profile_model(model, sample_inputs={"x": x}, device_type="virtual")
    assert profile.unknown == ""
    before = memory_allocated(0)
    model.to("virtual:0")
    given = x.to("virtual:0")
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        model(given)
    assert max_memory_allocated(0) - before == profile.weights + profile.dynamic_peaks({}, main=0)[0]


class Padded(nn.Module):
    """PyTorch's own encoder, which asks for nested tensors of padded batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_the_plan_of_pytorchs_encoder_holds_for_padded_batches() -> None:
    model, x, padding = Padded().eval(), torch.randn(3, 9, 16), torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = True
    profile = profile_model(model, sample_inputs={"x": x, "padding": padding}, device_type="virtual")
    assert profile.unknown == ""
    before = memory_allocated(0)
    model.to("virtual:0")
    given = x.to("virtual:0"), padding.to("virtual:0")
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        model(*given)
    predicted = profile.weights + profile.dynamic_peaks({}, main=0)[0]
    assert 0.6 * predicted <= max_memory_allocated(0) - before <= predicted

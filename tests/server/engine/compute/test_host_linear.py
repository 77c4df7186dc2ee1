"""Which library multiplies float32 matrices on the host: chosen by the processor, the same result to rounding.

The measured row multiple makes a row's bits independent of how many rows there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional

from bigmodel.errors import ServeError
from bigmodel.server.engine.compute import host_linear
from bigmodel.server.engine.compute.host_linear import (
    CANDIDATES,
    OneDnnLinear,
    choose_host_linear,
    give_as_it_is,
    give_contiguous,
    onednn_linear,
    probe_row_multiple,
)
from bigmodel.server.engine.compute.runner import PackedRunner
from tests.examples import alike
from tests.server.tiny import ask, tiny_engine, tiny_model

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, capability: str) -> None:
    information = tmp_path / "cpuinfo"
    information.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: whatever\n")
    monkeypatch.setattr(host_linear, "_PROCESSOR", information)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", "onednn"),
        ("AuthenticAMD", "AVX2", "torch"),
        ("GenuineIntel", "AVX512", "torch"),
        ("GenuineIntel", "AVX2", "torch"),
    ],
)
def test_onednn_is_chosen_for_avx512_processors_of_other_vendors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, capability: str, expected: str
) -> None:
    processor(monkeypatch, tmp_path, vendor, capability)
    assert choose_host_linear("auto") == expected


def test_pytorchs_library_is_kept_for_an_unknown_processor_vendor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processor(monkeypatch, tmp_path, "AuthenticAMD", "AVX512")
    monkeypatch.setattr(host_linear, "_PROCESSOR", tmp_path / "absent")
    assert choose_host_linear("auto") == "torch"


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_host_linear("torch") == "torch"
    with pytest.raises(ServeError, match="without oneDNN"):
        choose_host_linear("onednn")


@needs_onednn
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_product_with_onednn_is_equal_up_to_rounding(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80, bias=biased)
    x = torch.randn(1, rows, 48)
    with torch.inference_mode():
        expected = layer(x)
        with OneDnnLinear():
            found = layer(x)
        assert torch.equal(found, onednn_linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_empty_batches_use_pytorch(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 4, dtype=dtype)
    x = torch.randn(3, 4, dtype=dtype)
    with OneDnnLinear():
        assert torch.equal(functional.linear(x, weight), x @ weight.T)
        assert functional.linear(torch.empty(0, 4), torch.randn(8, 4)).shape == (0, 8)


@needs_onednn
def test_products_with_gradients_use_pytorch() -> None:
    layer = torch.nn.Linear(4, 8)
    with OneDnnLinear():
        layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.slow
@needs_onednn
@pytest.mark.skipif(
    choose_host_linear("auto") != "onednn" and Version(torch.__version__) < Version("2.13"),
    reason="oneDNN of this PyTorch is not chosen on this processor: rows differ with the address of weights",
)
def test_rows_have_the_same_bits_in_any_company_and_at_any_address() -> None:
    """A resident weight and one in a mapped file differ in where they begin; what is computed does not."""
    model = tiny_model(hidden_size=256, intermediate_size=704)
    assert probe_row_multiple(model, torch.device("cpu"), onednn_linear) == 1
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    elsewhere = torch.empty(weight.numel() + 3)[3:].view_as(weight).copy_(weight)
    x = torch.randn(1200, 256)
    with torch.inference_mode():
        whole = onednn_linear(x, weight)
        for count in (*range(1, 70), 129, 255, 300, 511, 512, 513, 700, 1024, 1199):
            assert torch.equal(onednn_linear(x[:count], elsewhere), whole[:count]), count


@pytest.mark.slow
@needs_onednn
def test_row_counts_are_padded_to_a_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of them it keeps a program in memory: any number, as prompts have, would add up to gigabytes."""
    given: set[int] = set()
    real = functional.pad
    monkeypatch.setattr(functional, "pad", lambda x, by: given.add(len(x) + by[3]) or real(x, by))
    weight = torch.randn(8, 4)
    for count in range(1, 1100):
        assert onednn_linear(torch.randn(count, 4), weight).shape == (count, 8)
    assert given <= set(host_linear.ROW_COUNTS)


@needs_onednn
def test_a_step_uses_the_chosen_library_and_does_not_change_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = onednn_linear
    monkeypatch.setattr(host_linear, "onednn_linear", lambda *a, **k: calls.append(1) or real(*a, **k))
    model = tiny_model()
    runner = PackedRunner(model, row_multiple=2, host_linear="onednn")
    runner.last_logits([[1, 2, 3]])
    assert len(calls) == 2 * 7 + 1  # seven products in a layer, and the logits
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(calls) == 15


@pytest.mark.slow
@needs_onednn
@alike("library", ["torch", "onednn"], first=1)
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(library: Any) -> None:
    engine = tiny_engine(host_linear=library)
    try:
        alone = ask(engine, "the thing", seed=1, temperature=1.0)
        alone.wait()
        crowd = [ask(engine, "the thing" if n == 3 else f"other {n}", seed=1, temperature=1.0) for n in range(6)]
        for collector in crowd:
            collector.wait()
        assert crowd[3].tokens() == alone.tokens()
    finally:
        engine.stop()


@alike(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 2)], first=1)
def test_padded_to_the_multiple_a_row_is_the_same_in_any_company(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        layer = torch.nn.Linear(256, 704, bias=False, dtype=dtype)
        multiple = probe_row_multiple(torch.nn.Sequential(layer), torch.device("cpu"))
        assert multiple in CANDIDATES
        rows = torch.randn(512, 256, dtype=dtype)
        with torch.inference_mode():
            whole = layer(rows)
            for count in (1, 2, 3, 5, 8, 13, 17, 33, 100, 129, 400):
                padded = rows[: -(-count // multiple) * multiple]
                assert torch.equal(layer(padded)[:count], whole[:count]), count
    finally:
        torch.set_num_threads(before)


def test_layers_of_gpt2_are_padded_to_what_their_own_product_needs() -> None:
    torch.manual_seed(1)
    layer = transformers.pytorch_utils.Conv1D(384, 128)
    multiple = probe_row_multiple(torch.nn.Sequential(layer), torch.device("cpu"))
    rows = torch.randn(512, 128)
    with torch.inference_mode():
        whole = layer(rows)
        for count in (1, 2, 3, 5, 13, 33, 100, 129):
            padded = rows[: -(-count // multiple) * multiple]
            assert torch.equal(layer(padded)[:count], whole[:count]), count


def test_products_whose_bits_depend_on_the_batch_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_linear, "_invariant", lambda weight, multiple, linear: False)
    with caplog.at_level(logging.WARNING):
        assert probe_row_multiple(tiny_model(), torch.device("cpu")) == 1
    assert "independent of the batch" in caplog.text


@pytest.mark.parametrize("make", [torch.nn.GELU, transformers.activations.GELUActivation])
def test_gelu_of_a_part_of_wider_rows_has_the_same_bits_in_any_company(make: Callable[[], torch.nn.Module]) -> None:
    model = torch.nn.Sequential(make())
    part = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))[:, :64]
    give_contiguous(model)
    give_contiguous(model)
    together = model(part)
    assert all(torch.equal(model(part[row : row + 1]), together[row : row + 1]) for row in range(len(part)))
    assert len(model[0]._forward_pre_hooks) == 1
    give_as_it_is(model)
    assert not model[0]._forward_pre_hooks

"""How near to memory speed does the host compute with packed weights, by PyTorch's kernels and by restoring?

A decode step reads every weight once, so on the host its bound is stored bytes over memory speed. Each variant
multiplies one row with the same number of weights, together larger than the processor's caches: matrices in float32 and
bfloat16, PyTorch's kernels for packed int8, int4 and fp8, and weights of published formats restored and multiplied.
Memory speed is that of a sum over as many bytes, by the same threads in the same rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, measure
from .harness.report import Cell

if TYPE_CHECKING:
    import torch

READ = "memory, read"
GROUP = 32
WORTH = 0.6
"""Share of memory speed from which computing with packed weights is worth giving up exact products."""

Products = tuple[int, Sequence[Callable[[], object]]]
"""Bytes of the weights of a variant, and a product with each of them."""

Make = Callable[..., Products]
"""Makes the products of a variant: of so many columns, rows and weights, with so many rows of inputs (1)."""

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "its kernels are those of the host"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--width", type=int, default=4096, help="columns of a weight")
    parser.add_argument("--height", type=int, default=11008, help="rows of a weight")
    parser.add_argument("--weights", type=int, default=4, help="weights of each variant")
    parser.add_argument("--rows", type=int, default=1, help="rows that each weight is multiplied with")


def run(options: argparse.Namespace) -> Report:
    """Measure seconds of one pass over the weights of each variant, and of reading as many bytes."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    width, height, count = (128, 64, 2) if options.quick else (options.width, options.height, options.weights)
    torch.manual_seed(options.seed)
    products = {name: make(width, height, count, options.rows) for name, make in VARIANTS.items()}
    with torch.inference_mode():
        samples = measure(
            [Variant(name, partial(_seconds, calls)) for name, (_, calls) in products.items()],
            options.rounds,
            seed=options.seed,
        )
    rows = _rows({name: nbytes for name, (nbytes, _) in products.items()}, samples)
    best = max(float(row[4] or 0) for row in rows if row[0] in PACKED)
    columns = [Column("weights"), Column("bytes", "bytes"), Column("one pass", "seconds"), Column("speed", "rate")]
    columns += [Column("share of memory speed", "ratio"), Column("over float32", "ratio")]
    sizes = {"width": width, "height": height, "weights": count, "rows": options.rows}
    inputs = "One row" if options.rows == 1 else f"{options.rows} rows"
    return Report(
        "host_kernels",
        options.device,
        settings={**sizes, "threads": torch.get_num_threads()},
        tables=[Table(f"{inputs} times {count} weights of {height} x {width}", columns, rows)],
        limits=[Limit("fastest packed kernel over memory speed", best, ">=", WORTH)],
        samples={"pass": samples},
    )


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    begun = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begun


def _rows(nbytes: dict[str, int], samples: Samples) -> list[list[Cell]]:
    """Return a row for each variant, the one with the shortest pass first."""
    speed = nbytes[READ] / samples.median(READ)
    rows: list[list[Cell]] = []
    for name, size in nbytes.items():
        seconds = samples.median(name)
        over = samples.ratio(name, "float32").median
        rows.append([name, size, seconds, size / seconds, size / seconds / speed, over])
    return sorted(rows, key=lambda row: float(row[2] or 0))


# --- variants -----------------------------------------------------------------------------------------


def _read(width: int, height: int, count: int, rows: int = 1) -> Products:
    import torch

    memory = torch.ones(2 * count * height * width // 8, dtype=torch.int64)  # as many bytes as in bfloat16
    return memory.nbytes, [memory.sum]


def _plain(name: str) -> Make:
    def make(width: int, height: int, count: int, rows: int = 1) -> Products:
        import torch
        from torch.nn import functional as F

        dtype: torch.dtype = getattr(torch, name)
        row = torch.randn(rows, width, dtype=dtype)
        weights = [torch.randn(height, width, dtype=dtype) for _ in range(count)]
        return _nbytes(weights), [lambda weight=weight: F.linear(row, weight) for weight in weights]

    return make


def _columns(width: int, height: int, count: int, rows: int = 1) -> Products:
    """The products of `torch.nn.functional.linear`, transposed: libraries choose other kernels for one column."""
    import torch

    columns = torch.randn(rows, width, dtype=torch.bfloat16).t()
    weights = [torch.randn(height, width, dtype=torch.bfloat16) for _ in range(count)]
    return _nbytes(weights), [lambda weight=weight: torch.mm(weight, columns) for weight in weights]


def _int8(width: int, height: int, count: int, rows: int = 1) -> Products:
    import torch

    row, scales = torch.randn(rows, width, dtype=torch.bfloat16), torch.rand(height, dtype=torch.bfloat16)
    weights = [torch.randint(-127, 127, (height, width), dtype=torch.int8) for _ in range(count)]
    multiply: Any = torch.ops.aten._weight_int8pack_mm
    return _nbytes(weights) + count * scales.nbytes, [lambda w=weight: multiply(row, w, scales) for weight in weights]


def _joined(width: int, height: int, count: int, rows: int = 1) -> Products:
    """The products of `_int8` as dispatched models compute them: short rows are read two or four at once."""
    import torch

    from bigmodel.quantized.host_kernels import HostKernel, PackedWeight

    row, scales = torch.randn(rows, width, dtype=torch.bfloat16), torch.rand(height, dtype=torch.bfloat16)
    kernel = HostKernel(8, width, (height, width))
    integers = [torch.randint(-127, 127, (height, width), dtype=torch.int8) for _ in range(count)]
    weights = [PackedWeight(kernel, each, scales) for each in integers]
    return _nbytes(integers) + count * scales.nbytes, [lambda w=weight: w.product(row, None) for weight in weights]


def _int4(width: int, height: int, count: int, rows: int = 1) -> Products:
    import torch

    pack: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    multiply: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
    row = torch.randn(rows, width, dtype=torch.bfloat16)
    scales = [torch.rand(width // GROUP, height, 2, dtype=torch.bfloat16) for _ in range(count)]
    weights = [pack(torch.randint(0, 15, (height, width), dtype=torch.int32), 1) for _ in range(count)]
    calls = [lambda w=weight, s=scale: multiply(row, w, GROUP, s) for weight, scale in zip(weights, scales)]
    return _nbytes(weights) + _nbytes(scales), calls


def _fp8(width: int, height: int, count: int, rows: int = 1) -> Products:
    import torch

    row, one = torch.randn(rows, width).to(torch.float8_e4m3fn), torch.tensor(1.0)
    weights = [torch.randn(height, width).to(torch.float8_e4m3fn) for _ in range(count)]
    multiply: Any = torch._scaled_mm
    calls = [lambda w=weight: multiply(row, w.t(), one, one, out_dtype=torch.bfloat16) for weight in weights]
    return _nbytes(weights), calls


def _restored(make_format: Callable[[], Any], tensors: Callable[[int, int], dict[str, torch.Tensor]]) -> Any:
    """Return the variant that restores the weights of a published format to bfloat16 and multiplies with them."""

    def make(width: int, height: int, count: int, rows: int = 1) -> Products:
        import torch
        from torch.nn import functional as F

        stored = [tensors(width, height) for _ in range(count)]
        row, format = torch.randn(rows, width, dtype=torch.bfloat16), make_format()
        calls = [
            lambda each=each: F.linear(row, format.restore(each, (height, width), torch.bfloat16)) for each in stored
        ]
        return sum(_nbytes(list(each.values())) for each in stored), calls

    return make


def _fp8_blocks() -> Any:
    from bigmodel.quantized.formats.fp8 import Fp8

    return Fp8((128, 128))


def _fp8_tensors(width: int, height: int) -> dict[str, torch.Tensor]:
    import torch

    scales = torch.rand(-(-height // 128), -(-width // 128))
    return {"weight": torch.randn(height, width).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _mxfp4() -> Any:
    from bigmodel.quantized.formats.mxfp4 import Mxfp4

    return Mxfp4()


def _mxfp4_tensors(width: int, height: int) -> dict[str, torch.Tensor]:
    import torch

    groups = width // GROUP
    blocks = torch.randint(0, 256, (height, groups, GROUP // 2), dtype=torch.uint8)
    return {
        "weight_blocks": blocks,
        "weight_scales": torch.randint(120, 130, (height, groups), dtype=torch.uint8),
    }


def _integers(target: str) -> Any:
    """Return the variant that restores the weights that `bigmodel quantize` writes."""

    def make(width: int, height: int, count: int, rows: int = 1) -> Products:
        import torch

        from bigmodel.quantized.encode import encoding

        kind = encoding(target, GROUP if target == "int4" else None)

        def tensors(columns: int, lines: int) -> dict[str, torch.Tensor]:
            return kind.encode(torch.randn(lines, columns, dtype=torch.bfloat16))

        products: Products = _restored(lambda: kind.format, tensors)(width, height, count, rows)
        return products

    return make


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


PACKED: dict[str, Make] = {
    "int8, _weight_int8pack_mm": _int8,
    "int8, the same, short rows joined": _joined,
    f"int4 in groups of {GROUP}, _weight_int4pack_mm_for_cpu": _int4,
    "fp8, _scaled_mm": _fp8,
}
"""Products by PyTorch's kernels that compute with packed weights."""

VARIANTS: dict[str, Make] = {
    READ: _read,
    "float32": _plain("float32"),
    "bfloat16": _plain("bfloat16"),
    "bfloat16, transposed": _columns,
    **PACKED,
    "int8, restored": _integers("int8"),
    f"int4 in groups of {GROUP}, restored": _integers("int4"),
    "fp8 in blocks, restored": _restored(_fp8_blocks, _fp8_tensors),
    "mxfp4, restored": _restored(_mxfp4, _mxfp4_tensors),
}

"""Obvious twins of the formats: random weights as each format stores them, and how they are read, element by element.

A twin makes the stored tensors of a weight from random codes and scales, and restores the weight with loops and
dictionaries, from the format's description alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [value / 12 for value in [0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]]


@dataclass(frozen=True, eq=False)
class Twin:
    """One way of storing weights.

    Attributes:
        name: for test ids.
        config: the ``quantization_config``.
        make: returns random stored tensors, by leaf, of a weight of a shape.
        restore: returns the weight of a shape, given its stored tensors.
        label: what the format says of itself.
    """

    name: str
    config: dict[str, Any]
    make: Callable[[tuple[int, int]], Tensors]
    restore: Callable[[Tensors, tuple[int, int]], torch.Tensor]
    label: str
    extra: dict[str, Any] = field(default_factory=dict)


def _scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.rand(shape) * 0.02 + 0.005).to(dtype)


def _codes(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, limit, shape)


def _each(shape: tuple[int, int], value: Callable[[int, int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    rows = [torch.stack([value(row, column) for column in range(shape[1])]) for row in range(shape[0])]
    return torch.stack(rows).to(dtype)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the integers of each row densely into int32 words, the lowest bits first."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        count = math.ceil(len(row) * bits / 32)
        words = [(number >> (32 * place)) & 0xFFFFFFFF for place in range(count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def _code(words: list[int], place: int, bits: int) -> int:
    """Return the integer at a place of densely packed words."""
    number = sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))
    return (number >> (place * bits)) & ((1 << bits) - 1)


def fp8(block: tuple[int, int] | None = (16, 16)) -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        scales = () if block is None else (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale_inv": _scales(*scales, dtype=torch.float32)}

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        weight, scales = tensors["weight"].float(), tensors["weight_scale_inv"].float()

        def value(row: int, column: int) -> torch.Tensor:
            scale = scales if block is None else scales[row // block[0], column // block[1]]
            return weight[row, column] * scale

        return _each(shape, value, torch.float32)

    config = {"quant_method": "fp8", "weight_block_size": None if block is None else list(block)}
    label = "fp8, one scale" if block is None else f"fp8, blocks of {block[0]} x {block[1]}"
    return Twin("fp8" if block else "fp8-tensor", config, make, restore, label)


def _compressed(name: str, kind: str, weights: dict[str, Any], make: Any, restore: Any, label: str) -> Twin:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return Twin(name, {**config, "ignore": ["lm_head"]}, make, restore, label)


def packed(bits: int = 4, group: int | None = 32, symmetric: bool = True) -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        rows, columns = shape
        groups = 1 if group is None else columns // group
        found = {
            "weight_packed": _words(_codes(1 << bits, *shape), bits),
            "weight_scale": _scales(rows, groups),
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            found["weight_zero_point"] = _words(_codes(1 << bits, groups, rows), bits).T.contiguous()
        return found

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        words, scale = tensors["weight_packed"].tolist(), tensors["weight_scale"]

        def value(row: int, column: int) -> torch.Tensor:
            place = 0 if group is None else column // group
            code = _code(words[row], column, bits)
            zero = 1 << (bits - 1) if symmetric else _code(tensors["weight_zero_point"][:, place].tolist(), row, bits)
            return torch.tensor(code - zero, dtype=torch.bfloat16) * scale[row, place]

        return _each(shape, value, torch.bfloat16)

    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    of = "channel scales" if group is None else f"groups of {group}"
    name = f"int{bits}-{strategy}{'' if symmetric else '-zeros'}"
    return _compressed(name, "pack-quantized", weights, make, restore, f"int{bits}, {of}")


def plain(kind: str = "int8", strategy: str = "channel") -> Twin:
    is_float = kind == "float8"

    def make(shape: tuple[int, int]) -> Tensors:
        scales = {"channel": (shape[0], 1), "tensor": (1,), "block": (-(-shape[0] // 16), -(-shape[1] // 16))}[strategy]
        weight = torch.randn(shape).to(torch.float8_e4m3fn) if is_float else (_codes(256, *shape) - 128).to(torch.int8)
        return {"weight": weight, "weight_scale": _scales(*scales) / (1 if is_float else 64)}

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        weight, scale = tensors["weight"].to(torch.bfloat16), tensors["weight_scale"]

        def value(row: int, column: int) -> torch.Tensor:
            own = {"channel": lambda: scale[row, 0], "tensor": lambda: scale[0]}
            return weight[row, column] * own.get(strategy, lambda: scale[row // 16, column // 16])()

        return _each(shape, value, torch.bfloat16)

    weights: dict[str, Any] = {"num_bits": 8, "type": "float" if is_float else "int", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [16, 16]
    of = "blocks of 16 x 16" if strategy == "block" else f"{strategy} scales"
    return _compressed(
        f"{kind}-{strategy}", f"{'float' if is_float else 'int'}-quantized", weights, make, restore, f"{kind}, {of}"
    )


def nvfp4() -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        return {
            "weight_packed": _codes(256, shape[0], shape[1] // 2).to(torch.uint8),
            "weight_scale": (torch.rand(shape[0], shape[1] // 16) * 400 + 40).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([20000.0]),
        }

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        packed, scale = tensors["weight_packed"].tolist(), tensors["weight_scale"].float()

        def value(row: int, column: int) -> torch.Tensor:
            byte = packed[row][column // 2]
            code = byte >> 4 if column % 2 else byte & 15
            return torch.tensor(E2M1[code]) * (scale[row, column // 16] / tensors["weight_global_scale"][0])

        return _each(shape, value, torch.bfloat16)

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return _compressed("nvfp4", "nvfp4-pack-quantized", weights, make, restore, "nvfp4, groups of 16")


def gptq(bits: int = 4, group: int = 32, act_order: bool = False) -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        rows, columns = shape
        order = torch.randperm(columns) if act_order else torch.arange(columns)
        return {
            "qweight": _words(_codes(1 << bits, rows, columns), bits).T.contiguous(),
            "qzeros": _words(_codes(1 << bits, columns // group, rows), bits),
            "scales": _scales(columns // group, rows, dtype=torch.float16),
            "g_idx": (order // group).to(torch.int32),
        }

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        words, zeros = tensors["qweight"].T.tolist(), tensors["qzeros"].tolist()

        def value(row: int, column: int) -> torch.Tensor:
            place = int(tensors["g_idx"][column])
            zero = _code(zeros[place], row, bits) + 1
            code = torch.tensor(_code(words[row], column, bits) - zero, dtype=torch.float16)
            return code * tensors["scales"][place, row]

        return _each(shape, value, torch.float16)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False}
    name = f"gptq{bits}{'-act-order' if act_order else ''}"
    return Twin(name, config, make, restore, f"gptq int{bits}, groups of {group}")


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int = 32) -> Twin:
    def pack(codes: torch.Tensor) -> torch.Tensor:
        return _words(codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)

    def make(shape: tuple[int, int]) -> Tensors:
        rows, columns = shape
        return {
            "qweight": pack(_codes(16, columns, rows)),
            "qzeros": pack(_codes(16, columns // group, rows)),
            "scales": _scales(columns // group, rows, dtype=torch.float16),
        }

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        words, zeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()

        def value(row: int, column: int) -> torch.Tensor:
            place = row // 8 * 8 + _AWQ_ORDER.index(row % 8)
            code = _code(words[column], place, 4) - _code(zeros[column // group], place, 4)
            return torch.tensor(code, dtype=torch.float16) * tensors["scales"][column // group, row]

        return _each(shape, value, torch.float16)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Twin("awq", config, make, restore, f"awq int4, groups of {group}")


def bnb4(kind: str = "nf4", nested: bool = False, block: int = 64) -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        blocks = math.ceil(math.prod(shape) / block)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        found = {
            "weight": _codes(256, math.prod(shape) // 2, 1).to(torch.uint8),
            "weight.absmax": torch.rand(blocks) * 0.2 + 0.05,
            "weight.quant_map": torch.tensor(NF4 if kind == "nf4" else FP4, dtype=torch.float32),
        }
        if nested:
            found["weight.absmax"] = _codes(256, blocks).to(torch.uint8)
            found["weight.nested_absmax"] = torch.rand(math.ceil(blocks / 256)) * 0.1
            found["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1234567}
        octets = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {**found, f"weight.quant_state.bitsandbytes__{kind}": octets}

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        octets, values = tensors["weight"].flatten().tolist(), tensors["weight.quant_map"]

        def factor(number: int) -> torch.Tensor:
            stored = tensors["weight.absmax"][number]
            if not nested:
                return stored
            value = tensors["weight.nested_quant_map"][int(stored)] * tensors["weight.nested_absmax"][number // 256]
            return value + 0.1234567

        def value(row: int, column: int) -> torch.Tensor:
            place = row * shape[1] + column
            code = octets[place // 2] & 15 if place % 2 else octets[place // 2] >> 4
            return values[code] * factor(place // block)

        return _each(shape, value, torch.bfloat16)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    name = f"{kind}{'-nested' if nested else ''}"
    return Twin(name, config, make, restore, f"bitsandbytes {kind}, blocks of {block}")


def bnb8() -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        return {
            "weight": (_codes(256, *shape) - 128).to(torch.int8),
            "SCB": torch.rand(shape[0]) * 0.2,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        def value(row: int, column: int) -> torch.Tensor:
            return tensors["weight"][row, column].float() * tensors["SCB"][row] * 7.874015718698502e-3

        return _each(shape, value, torch.float32)

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Twin("bnb-int8", config, make, restore, "bitsandbytes int8")


def mxfp4() -> Twin:
    def make(shape: tuple[int, int]) -> Tensors:
        groups = shape[1] // 32
        return {
            "weight_blocks": _codes(256, shape[0], groups, 16).to(torch.uint8),
            "weight_scales": (_codes(6, shape[0], groups) + 118).to(torch.uint8),
        }

    def restore(tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        def value(row: int, column: int) -> torch.Tensor:
            group, place = divmod(column, 32)
            byte = int(tensors["weight_blocks"][row, group, place // 2])
            code = byte >> 4 if place % 2 else byte & 15
            return torch.tensor(E2M1[code] * 2.0 ** (int(tensors["weight_scales"][row, group]) - 127))

        return _each(shape, value, torch.float32)

    return Twin("mxfp4", {"quant_method": "mxfp4"}, make, restore, "mxfp4, groups of 32")


LINEAR = [
    fp8(),
    packed(symmetric=False),
    plain("float8"),
    nvfp4(),
    gptq(act_order=True),
    awq(),
    bnb4(nested=True),
    bnb8(),
    packed(bits=3),
    fp8(None),
    packed(),
    packed(group=None),
    packed(bits=8, symmetric=False),
    plain("int8"),
    plain("float8", "tensor"),
    plain("float8", "block"),
    gptq(),
    gptq(bits=8),
    bnb4(),
    bnb4("fp4"),
]
"""Twins of all formats in which linear layers are stored; the first ones are one of each kind."""

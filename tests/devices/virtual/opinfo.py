"""Every operation of PyTorch's own operator database, run on the virtual accelerator and compared with the CPU.

`python -m tests.devices.virtual.opinfo` checks all of them and lists those that differ, abort or hang; names as
arguments restrict it to these, and `--part 2/8` to the second of eight parts. Operations run in child processes: where
one aborts or hangs, the next is still checked.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import subprocess
import sys
import unittest
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 3
"""Sample inputs of each operation, spread over those that the database has; of further dtypes one each."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
"""Dtypes that an operation is checked in, as far as it takes them on the CPU; the first of them most thoroughly."""

LIMIT = 60.0
"""Seconds after which an operation is said to hang."""

UNDEFINED = ("empty", "new_empty", "resize_")
"""Operations whose elements are whatever the memory held."""

HOST_ARGUMENTS = ("tensor_split",)
"""Operations that read tensors among their arguments on the host, also on real accelerators."""

FOR_SUBCLASSES = ("linalg.eigvalsh", "linalg.svdvals", "linalg.cond", "norm.nuc", "linalg.norm")
"""Operations for which PyTorch also computes vectors where tensors are of a subclass: other last bits."""

EQUAL, REFUSED = "equal", "NotImplementedError"
PASSED = (EQUAL, REFUSED)


def operations() -> list[Any]:
    """Return the entries of the database."""
    # PyTorch's test utilities derive a class from this package's; the database does not use it.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(operation: Any) -> str:
    """Return the name of an entry with its variant, such as "div.floor_rounding"."""
    variant = operation.variant_test_name
    return f"{operation.name}.{variant}" if variant else str(operation.name)


def check(operation: Any) -> str:
    """Run samples of one operation on both devices. Return `EQUAL`, `REFUSED` or a description of the difference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [_compared(operation, sample) for sample in _samples(operation)]
    return next((result for result in results if result not in PASSED), min(results, default=EQUAL))


def _samples(operation: Any) -> Iterator[Any]:
    supported = operation.supported_dtypes("cpu")
    dtypes = [dtype for dtype in DTYPES if dtype in supported] or sorted(supported, key=str)[:1]
    for position, dtype in enumerate(dtypes):
        wanted = 1 if position else SAMPLES
        differentiable = operation.supports_autograd and dtype.is_floating_point
        _seed()
        samples = list(operation.sample_inputs("cpu", dtype, requires_grad=differentiable))
        yield from samples[:: max(len(samples) // wanted, 1)][:wanted]


def _compared(operation: Any, sample: Any) -> str:
    try:
        expected = _run(operation, sample, "cpu")
    except Exception:
        return EQUAL  # there is nothing to compare with
    try:
        found = _run(operation, sample, "virtual:0")
    except NotImplementedError:
        return REFUSED
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if operation.name.startswith(UNDEFINED):
        expected, found = (
            tree_map(lambda leaf: leaf.shape if isinstance(leaf, Tensor) else leaf, each) for each in (expected, found)
        )
    exact = {} if operation.name in FOR_SUBCLASSES or name_of(operation) in FOR_SUBCLASSES else {"rtol": 0, "atol": 0}
    try:
        torch.testing.assert_close(found[0], expected[0], **exact, equal_nan=True)
        # PyTorch computes some gradients by other formulas for accelerators than for the CPU.
        torch.testing.assert_close(found[1], expected[1], equal_nan=True)
    except AssertionError as error:
        return f"differs: {' '.join(str(error).split())[:200]}"
    return EQUAL


def _run(operation: Any, sample: Any, device: str) -> Any:
    """Return the operation's outputs and the gradients of its inputs, on the host."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().to(device).requires_grad_(value.requires_grad)
        return torch.device(device) if isinstance(value, torch.device) else value

    arguments = (sample.args, sample.kwargs)
    if operation.name not in HOST_ARGUMENTS:
        arguments = tree_map(moved, arguments)
    given = (tree_map(moved, sample.input), arguments[0], dict(arguments[1]))
    if "device" in given[2]:
        given[2]["device"] = device
    inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
    _seed()
    output = operation.op(given[0], *given[1], **given[2])
    if device != "cpu":
        torch.get_device_module("virtual").synchronize()  # `to` may return a copy that is still under way
    total: Any = sum(
        leaf.abs().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    )
    gradients: Any = ()
    if inputs and isinstance(total, Tensor):
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return tree_map(_on_host, (output, gradients))


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def results(numbers: list[int]) -> Iterator[tuple[int, str]]:
    """Yield (number, result) of these entries of the database, checked in child processes."""
    waiting = list(numbers)
    while waiting:
        yield from _until_one_fails(waiting)


def _until_one_fails(waiting: list[int]) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "tests.devices.virtual.opinfo", "--numbers", ",".join(map(str, waiting))]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        while waiting:
            ready, _, _ = select.select([child.stdout], [], [], LIMIT)
            line = child.stdout.readline() if ready else ""
            number = waiting.pop(0)
            if not line:
                yield number, "hangs" if not ready else f"ends the process (exit status {child.wait()})"
                return
            yield number, line.rstrip("\n")
    finally:
        child.kill()
        child.wait()


def _serve(numbers: list[int]) -> None:
    """Check these entries, one line each."""
    from bigmodel.devices import virtual

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    virtual.enable(1)
    entries = operations()
    for number in numbers:
        print(check(entries[number]).replace("\n", " "), file=answers, flush=True)


def main() -> int:
    """Check the operations named on the command line, or all. Return 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="operations; all by default")
    parser.add_argument("--part", default="1/1", help="which part of the chosen operations, such as 2/8")
    parser.add_argument("--numbers", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.numbers:
        _serve([int(number) for number in arguments.numbers.split(",")])
        return 0
    names = [name_of(operation) for operation in operations()]
    chosen = [number for number, name in enumerate(names) if not arguments.names or name in arguments.names]
    part, parts = map(int, arguments.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    counts = {EQUAL: 0, REFUSED: 0, "fail": 0}
    for number, result in results(chosen):
        counts[result if result in counts else "fail"] += 1
        if result != EQUAL:
            print(f"{names[number]}: {result}", flush=True)
    print(f"{len(chosen)} operations: {counts}")
    return int(counts["fail"] > 0)


if __name__ == "__main__":
    sys.exit(main())

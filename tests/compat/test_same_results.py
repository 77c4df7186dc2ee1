"""Functions that exist under both names return the same as accelerate's, where that is installed."""

from __future__ import annotations

import io
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow  # accelerate is imported beside this project
Pair = namedtuple("Pair", "first second")
Uses = Callable[[Callable[[str], Any]], Any]


def _tied() -> nn.Module:
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    model.head = nn.Linear(32, 32)
    model.head.weight = model.body[0].weight
    return model


def _blocks() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ReLU(), nn.ReLU()]), nn.ModuleList([nn.ReLU(), nn.Tanh()]))
    return nn.Sequential(model)


def _fallback(of: Callable[[str], Any], limit: int | str) -> Any:
    model = _tied()
    sizes = import_module("bigmodel.profile").compute_module_sizes(model)
    groups = [["body.0.weight", "head.weight"]]
    allocate = of("utils.modeling.fallback_allocate")
    name, _, left = allocate(list(model.named_children()), sizes, limit, [], groups)
    return name, [each for each, _ in left]


def _saved(of: Callable[[str], Any]) -> Any:
    file = io.BytesIO()
    of("utils.save")({"a": torch.ones(2)}, file)
    file.seek(0)
    return of("utils.load")(file)["a"].tolist()


def _without_ties(of: Callable[[str], Any]) -> Any:
    state = _tied().state_dict()
    cleaned = of("utils.clean_state_dict_for_safetensors")(state)
    return sorted(cleaned), sorted(state), all(each.is_contiguous() for each in cleaned.values())


def _retied(of: Callable[[str], Any]) -> Any:
    model = _tied()
    model._tied_weights_keys = ["head.weight"]  # type: ignore[assignment]

    def copied(module: nn.Module) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
        return module

    initialise = of("utils.fsdp_utils.ensure_weights_retied")(copied, model, torch.device("cpu"))
    for module in list(model.modules()):
        initialise(module)
    return model.head.weight is model.body[0].weight


def _told(of: Callable[[str], Any], **variables: str) -> Any:
    with of("utils.patch_environment")(**variables):
        found = of("utils.get_cpu_distributed_information")()
    return found.rank, found.world_size, found.local_rank, found.local_world_size


def _step(of: Callable[[str], Any]) -> Any:
    holder = nn.Module()
    return of("optimizer.patch_optimizer_step")(holder, lambda value: value + 1)(2), holder._accelerate_step_called


CASES: dict[str, Uses] = {
    "sizes as text": lambda of: [of("utils.convert_bytes")(size) for size in (12, 1536, 3 * 2**30, 2**51)],
    "shapes": lambda of: of("utils.operations.get_shape")({"a": [torch.ones(2, 3)], "b": Pair(torch.ones(1), 2)}),
    "dtypes by number": lambda of: of("utils.operations.TENSOR_TYPE_TO_INT"),
    "outputs in float32": lambda of: of("utils.convert_outputs_to_fp32")(lambda: torch.ones(1).half())().dtype,
    "repeated blocks": lambda of: [
        [of(f"utils.other.{name}")(module) for module in _blocks().modules()]
        for name in ("is_repeated_blocks", "has_repeated_blocks")
    ],
    "children first": lambda of: [
        name for name, _ in of("utils.other.get_module_children_bottom_up")(_blocks(), return_fqns=True)
    ],
    "first and last linear layers": lambda of: of("utils.ao.find_first_last_linear_layers")(_tied()),
    "linear layers to convert": lambda of: [
        of("utils.ao.filter_linear_layers")(nn.Linear(*sizes), name, ["head"])
        for sizes, name in [((16, 16), "a"), ((16, 15), "a"), ((16, 16), "head")]
    ],
    "a part that fits": lambda of: [_fallback(of, limit) for limit in (10**6, 5000, "3KB", "nonsense")],
    "names before wrapping": lambda of: of("utils.fsdp2_canonicalize_names")(
        {"_orig_mod.a._checkpoint_wrapped_module.b": 1, "c._orig_mod.d": 2}
    ),
    "an open file": _saved,
    "ties taken out": _without_ties,
    "ties made again": _retied,
    "ranks of Open MPI": lambda of: _told(of, OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="8"),
    "ranks of none": _told,
    "the kind of device": lambda of: of("utils.get_current_device_type")(),
    "a path more": lambda of: of("utils.launch.env_var_path_add")("NO_SUCH_PATHS", "/a"),
    "values of enumerations": lambda of: [
        (value in of(f"utils.{kind}"))
        for kind in ("PrecisionType", "RNGType", "LoggerType") for value in ("fp16", "xla", 1)
    ],
    "members of enumerations": lambda of: [
        sorted(member.value for member in of(f"utils.{kind}") if member.name not in ("MPS", "IPEX", "CUDAGRAPHS"))
        for kind in ("DynamoBackend", "RNGType", "ComputeEnvironment", "SageMakerDistributedType", "PrecisionType")
    ],
    "nested state": lambda of: of("optimizer.move_to_device")({"a": [torch.ones(1), (2, None)]}, "cpu"),
    "a step that is noted": _step,
    "rows of a call": lambda of: [
        of("inference.find_pippy_batch_size")(*call)
        for call in [((torch.ones(3, 1),), {}), ((1,), {"a": torch.ones(4)}), (None, None)]
    ],
    "a package in this version": lambda of: [
        bool(of("utils.is_bnb_available")(min_version="0.40")), of("utils.imports.is_numpy_available")("1.0"),
        of("utils.is_weights_only_available")(), of("utils.is_xccl_available")(),
    ],
    "settings of context parallelism": lambda of: of("utils.TorchContextParallelConfig")().cp_comm_strategy,
    "settings of sequence parallelism": lambda of: vars(of("utils.DeepSpeedSequenceParallelConfig")()),
    "a value of DeepSpeed's": lambda of: of("utils.deepspeed.HfDeepSpeedConfig")({"a": {"b": 1}}).get_value(
        ds_key_long="a.b"
    ),
    "the last layer kept whole": lambda of: of("utils.bnb.get_keys_to_not_convert")(nn.Sequential(nn.Linear(2, 2))),
}  # fmt: skip


@contextmanager
def _forgetting() -> Iterator[None]:
    """Both libraries keep a state of the process, which other tests must not find."""
    from bigmodel.state import PartialState

    try:
        yield
    finally:
        PartialState._reset_state()


@pytest.mark.parametrize("case", CASES)
def test_both_return_the_same(case: str) -> None:
    pytest.importorskip("accelerate")

    def of(library: str) -> Callable[[str], Any]:
        def get(path: str) -> Any:
            module, _, name = path.rpartition(".")
            return getattr(import_module(f"{library}.{module}"), name)

        return get

    with _forgetting():
        assert _plain(CASES[case](of("bigmodel"))) == _plain(CASES[case](of("accelerate")))


def _plain(value: Any) -> Any:
    """Return the value as text, tensors by their numbers."""
    return repr(value)

"""One dry run for equal models: tests that need a profile, and are not about profiles, share what was recorded.

A dry run takes a quarter of a second, and many tests of the rooms above profile the same tiny models at the same
shapes. Only models of transformers' own modules are shared, as they are when made: whatever their dry run may depend on
is compared. Tests of `profile` run every one, and so do those of models with other modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.profile import profile
from bigmodel.profile.trace.dry_run import Phase, dry_run

NOT_SHARED = "tests/profile"
MOST_KNOWN = 64
"""Dry runs that are kept, in the order in which they were last asked for."""

_OWN = ("transformers.models.", "transformers.integrations.", "transformers.activations", "torch.nn.modules.")
_PLAIN = (int, float, str, bool, tuple, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_known: dict[Hashable, list[Phase]] = {}


@pytest.fixture(autouse=True, scope="module")
def equal_models_share_dry_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share dry runs in this module, unless it is of a room that they are about."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.nodeid.startswith(NOT_SHARED):
            patch.setattr(profile, "dry_run", _shared)
        yield


def _shared(model: nn.Module, *args: Any, **options: Any) -> list[Phase]:
    key = _key(model, *args, **options)
    if key is None:
        return dry_run(model, *args, **options)
    found = _known.pop(key, None)
    if found is None:
        found = dry_run(model, *args, **options)
        if len(_known) >= MOST_KNOWN:
            del _known[next(iter(_known))]
    _known[key] = found
    return list(found)


def _key(
    model: nn.Module,
    units: Sequence[Any],
    workload: Hashable,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    example: object,
    packed: bool = False,
) -> Hashable | None:
    """Return what the dry run of a model depends on; None: it is not shared."""
    config = getattr(model, "config", None)
    modules = dict(model.named_modules(remove_duplicate=False))
    if example is not None or config is None or not all(map(_is_own, modules.values())):
        return None
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    first: dict[int, str] = {}

    def described(name: str, t: torch.Tensor) -> Hashable:
        own = (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        return name, first.setdefault(id(t), name), dtypes.get(id(t)), own

    weights = tuple(described(name, tensor) for name, tensor in tensors.items())
    parts = tuple((name, type(module), _settings(module)) for name, module in modules.items())
    generation = str(getattr(model, "generation_config", None))
    return (parts, weights, tuple(units), workload, device, packed, _values(config), generation)


def _is_own(module: nn.Module) -> bool:
    """Whether a module is transformers' or PyTorch's as it was made: no test has changed what it does."""
    own = vars(module)
    changed = "forward" in own or any(own.get(name) for name in _HOOKS)
    return type(module).__module__.startswith(_OWN) and not changed


def _settings(module: nn.Module) -> str:
    return repr([item for item in vars(module).items() if isinstance(item[1], _PLAIN)])


def _values(config: Any) -> str:
    """Return all values of a config, also those that it does not write to its file."""
    values = [(name, _values(v) if hasattr(v, "to_dict") else repr(v)) for name, v in sorted(vars(config).items())]
    return repr(values)

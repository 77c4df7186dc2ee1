"""`copy.deepcopy` of a part of a dispatched model: a plain module, as it would be without dispatching.

Libraries copy parts to train the copies beside the originals, as peft does with `modules_to_save`. Weights are copied
where they lie between forwards, those on disk to memory. A copy that is put back into the model is found at its next
call, as all that is added (`additions`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .attached_forward import REPLACED_BY_HOOK, AttachedForward
from .refusals import NotCopied

METHOD = "__deepcopy__"


class CopyPart(NotCopied):
    """Is ``module.__deepcopy__`` of each part of a model while the model is dispatched.

    Args:
        module: The part.
        refuse_while_running: Raises DispatchError while a forward of the model is using streamed weights.
    """

    def __init__(self, module: nn.Module, refuse_while_running: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._refuse_while_running = refuse_while_running

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a plain copy of the part.

        Raises:
            DispatchError: A forward is running.
        """
        module = self._module()
        assert module is not None, "the module is gone"
        self._refuse_while_running()
        with torch.inference_mode(False), torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) not in memo:
                    memo[id(tensor)] = like(tensor, tensor.detach().clone(memory_format=torch.preserve_format))
            return plain_copy(module, memo)


def plain_copy(module: nn.Module, memo: dict[int, Any], left_out: frozenset[str] = frozenset()) -> nn.Module:
    """Return a copy of a module without what dispatching has added, nor its attributes of these names.

    Copies of its tensors are in `memo`.
    """
    plain: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = plain
    added = {name: value for name, value in vars(module).items() if isinstance(value, NotCopied)}
    own = {name: value for name, value in vars(module).items() if name not in added and name not in left_out}
    vars(plain).update(copy.deepcopy(own, memo))
    for name, value in added.items():
        if isinstance(value, AttachedForward):
            if value.replaced is not None:
                vars(plain).setdefault(value.method, copy.deepcopy(value.replaced, memo))
            if name == REPLACED_BY_HOOK:
                vars(plain)[name] = getattr(type(plain), value.method).__get__(plain)
    return plain


def like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data` as the parameter or buffer that `tensor` is."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)

"""Functions of autograd (`torch.autograd.Function`) that are given weights of other parts of a dispatched model.

The operations in their forward and backward compute with copies of such weights, as others do (`outside_use`). But
autograd takes the gradient that a function returns for a tensor where that tensor is. A weight that gets one is
therefore copied before the function is applied, by an operation that brings the gradient back.

From PyTorch 2.14 on this holds for `apply` as it is looked up in a call; one that was taken before the model was
dispatched, as in ``product = Product.apply``, is a built-in function, which nothing can follow.

The functions of this project are given weights on the host on purpose, and return gradients there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import Function, _SingleLevelFunction

from ...devices.scripts import ReplacedMethod
from .outside_use import brought_together, is_marked


class CopiesForFunctions:
    """From now until `remove` is called, functions of autograd get copies of weights that lie elsewhere."""

    def __init__(self) -> None:
        _replaced.add(self)

    def remove(self) -> None:
        """Take it back; a second time changes nothing."""
        _replaced.remove(self)


_BASE: Any = vars(torch._C._FunctionBase)["apply"]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    is_own = cls.__module__.partition(".")[0] == "bigmodel"
    if not is_own and torch.is_grad_enabled() and any(map(is_marked, args)):
        args = brought_together(args)
    return _BASE.__get__(None, cls)(*args, **kwargs)


# The class below `Function` where that one's `apply`, which many hold as an object, calls it: before PyTorch 2.14.
_OWNER = _SingleLevelFunction if isinstance(vars(Function)["apply"], classmethod) else Function
_replaced: ReplacedMethod[CopiesForFunctions] = ReplacedMethod(_OWNER, "apply", classmethod(_apply))

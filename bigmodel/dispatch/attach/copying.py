"""`copy.deepcopy` of a dispatched model: a second one, dispatched by the same plan, with slots and threads of its own.

Weights that view a checkpoint, and that nobody has written to, view it in the copy, too: through a map of its own, so
that what is written to one model is not seen in the other. All others are copied where they lie; those on disk to a
file of their own, if the model was dispatched with a folder for them, else to memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...checkpoint.mapping import MapsAgain
from ...errors import DispatchError
from ..placement.options import Options
from ..placement.resolve import ResolvedMap
from .copying_parts import like, plain_copy
from .dispatched import DISPATCH_ATTRIBUTES, Dispatched, dispatched
from .refusals import NotCopied

Attach = Callable[[nn.Module, ResolvedMap, Options], None]
"""Dispatches a model whose weights lie where they belong."""


class CopyDispatched(NotCopied):
    """Is ``model.__deepcopy__`` while a model is dispatched.

    Args:
        model: The model.
        attach: Dispatches the copy.
    """

    def __init__(self, model: nn.Module, attach: Attach) -> None:
        self._model = weakref.ref(model)
        self._attach = attach

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy that is dispatched as the model is.

        Raises:
            DispatchError: A forward is running, or the plan is not final before the first forward.
        """
        model = self._model()
        assert model is not None, "the model is gone"
        found = dispatched(model)
        assert found is not None, "the attribute goes when dispatching is undone"
        found.refuse_while_running()
        if found.plan.guarded:
            raise DispatchError(
                "a model whose memory is not known is placed by its first forward: run one before you copy it"
            )
        with torch.inference_mode(False), torch.no_grad():
            plain = _plain_copy(model, found, memo)
        self._attach(plain, found.resolved, found.options)
        return plain


def _plain_copy(model: nn.Module, found: Dispatched, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a dispatched model as it would be without, its weights where they lie between forwards."""
    again, views = MapsAgain(), {id(tensor): view for tensor, view in found.aligned}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = _copied(tensor, views.get(id(tensor), tensor), again)
    return plain_copy(model, memo, frozenset(DISPATCH_ATTRIBUTES))


def _copied(tensor: torch.Tensor, view: torch.Tensor, again: MapsAgain) -> torch.Tensor:
    """Return a copy of a parameter or buffer; `view` is what it is in its file, if it has been copied to memory."""
    data = again.view(view)
    if data is None:
        data = tensor.detach().clone(memory_format=torch.preserve_format)
    return like(tensor, data)

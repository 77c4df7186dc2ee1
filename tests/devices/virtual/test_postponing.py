"""A backward pass for which the memory is too small ends in an error, whatever part of it found that out.

In a process of its own: what is tested for is that it goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigmodel import dispatch_model
from bigmodel.devices import max_memory_allocated, memory_allocated, virtual
from bigmodel.devices.native_threads import let_threads_finish
from tests.preloaded import run

DEVICE = "virtual:0"


def chain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def reused(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of one tensor are summed by the engine itself."""
    hidden = model[0](x)
    return (hidden + hidden.exp() + hidden * hidden).sum()


def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A backward pass within the backward pass."""
    return checkpoint(model, x, use_reentrant=True).square().sum()


def made_anew(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of views begin as zeros that the engine asks for."""
    return model(x)[1:, ::2].cos().sum()


def settled_memory() -> int:
    """Return the bytes in use when neither garbage nor autograd's thread, which lags behind, holds any more."""
    gc.collect()
    let_threads_finish("pt_autograd")
    return memory_allocated(DEVICE)


def end_at_every_capacity(loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Give a backward pass ever more memory until it has enough; each time but the last it must end in an error."""
    virtual.enable(count=1)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2))).to(DEVICE)
    x = torch.ones(8, 32, device=DEVICE, requires_grad=True)
    errors, capacity = 0, settled_memory()
    while True:
        model.zero_grad()
        x.grad = None
        virtual.configure(0)
        loss = loss_of(model, x)
        capacity = max(capacity, settled_memory()) + 2048
        virtual.configure(0, capacity)
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            errors += 1
        else:
            break
        assert max_memory_allocated(DEVICE) <= capacity
    assert errors > 1
    found = [parameter.grad for parameter in model.parameters()]
    virtual.configure(0)
    model.zero_grad()
    loss_of(model, x).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert (gradient is None) == (parameter.grad is None)
        assert gradient is None or torch.equal(gradient.cpu(), parameter.grad.cpu())


@pytest.mark.slow
def test_a_backward_pass_out_of_memory_raises_and_the_process_goes_on() -> None:
    code = (
        f"from {__name__} import *\ngc.freeze()\n"
        "for loss_of in chain, reused, recomputed, made_anew: end_at_every_capacity(loss_of)"
    )
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_memory_of_a_failed_pass_is_free_when_its_error_has_been_caught() -> None:
    """Without any garbage collection: who has run out of memory needs it at once."""
    virtual.enable(count=1)

    def run_out_of_memory() -> None:
        x = torch.ones(8, 32, requires_grad=True).to(DEVICE)
        loss = x.exp().square().sum()
        virtual.configure(0, memory_allocated(DEVICE) + 512)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()

    gc.disable()
    try:
        run_out_of_memory()
        let_threads_finish("pt_autograd")
        assert memory_allocated(DEVICE) == 0
    finally:
        gc.enable()
        virtual.disable()


def test_python_code_in_a_backward_pass_gets_the_error_at_once() -> None:
    virtual.enable(count=1)
    caught: list[str] = []

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(context, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(context, gradient):  # type: ignore[no-untyped-def]
            virtual.configure(0, memory_allocated(DEVICE))
            try:
                torch.empty(1000, device=DEVICE)
            except torch.OutOfMemoryError as error:
                caught.append(str(error))
            virtual.configure(0)
            return gradient

    try:
        Greedy.apply(torch.ones(3, device=DEVICE, requires_grad=True)).sum().backward()
    finally:
        virtual.disable()
    assert len(caught) == 1


def refuse(*_: object) -> None:
    raise ValueError("the hook refuses")


def hook_tensor(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    hidden = model(x)
    hidden.register_hook(refuse)
    return hidden


def hook_moved_leaf(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(4))
    weight.register_hook(refuse)
    return model(x) * dispatch_model(Scale(weight), {"": 0}).weight


def hook_leaf(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    model.weight.register_post_accumulate_grad_hook(refuse)  # type: ignore[operator, union-attr]
    return model(x)


def hook_module(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    model.register_full_backward_hook(refuse)
    return model(x)


def hook_module_before(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    model.register_full_backward_pre_hook(refuse)
    return model(x)


class Scale(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


HOOKS = (hook_tensor, hook_moved_leaf, hook_leaf, hook_module, hook_module_before)


def raise_in_every_hook() -> None:
    """Each backward pass raises its hook's error and leaves nothing behind for the next."""
    virtual.enable(count=1)
    for hooked in HOOKS:
        x = torch.ones(2, 4, device=DEVICE, requires_grad=True)
        loss = hooked(x, nn.Linear(4, 4).to(DEVICE)).sum()
        with pytest.raises(ValueError, match="the hook refuses"):
            loss.backward()
        torch.ones(2, device=DEVICE, requires_grad=True).exp().sum().backward()


@pytest.mark.slow
def test_an_error_of_a_hook_is_raised_by_the_backward_pass() -> None:
    done = run(["-c", f"from {__name__} import *\nraise_in_every_hook()"])
    assert done.returncode == 0, done.stderr


def test_a_hook_is_removed_by_its_handle_and_changes_gradients_as_elsewhere() -> None:
    virtual.enable(count=1)
    try:
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        x.register_hook(lambda gradient: gradient * 2)
        x.register_hook(refuse).remove()
        (x * 3).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [6.0] * 3
    finally:
        virtual.disable()

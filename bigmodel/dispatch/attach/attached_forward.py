"""The attachment: the object that replaces a module's forward while its model is dispatched.

Its caller may hand a module something to write into: a list, a dict that later layers read keys and values from, a
tensor that is filled in place. The module gets copies on its own device (`InputTransfer`), so what it has written is
put into the originals when it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, MutableMapping
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...devices import HOST, torch_device
from ...devices.nested import (
    Container,
    are_all_on,
    copy_to,
    first_tensor,
    moves_itself,
    open_container,
    send_to_device,
    share_elements,
    spanned_elements,
)
from ...errors import DispatchError
from ..mapped.mapped_block import MappedBlock
from ..mapped.readahead import ReadAhead
from ..streaming.admission import Admission
from ..streaming.gradients import Compute, run_with_gradients
from ..streaming.streamer import Streamer, is_transformed
from ..streaming.transform_budgets import TransformBudgets
from ..streaming.unplanned_calls import MeasuredCalls, Unplanned
from ..transfer.stages import running_step
from ..weights.block import Block
from .host_or_device import HostOrDevice
from .refusals import NOT_TRACED, NotCopied, NotTracedError
from .untraced import leave_untraced

UNTRACED = ("bigmodel.devices", "bigmodel.profile", "bigmodel.checkpoint", "bigmodel.dispatch")
"""Packages that torch.compile does not trace: of a dispatched model it compiles only the modules' own forwards. Each
attached module breaks the graph once; its forward is a separate graph, which modules of the same kind share."""


REPLACED_BY_HOOK = "_old_forward"
"""Attribute in which hooks of accelerate's protocol keep the forward that they wrap."""


class AttachedForward(NotCopied):
    """Replaces ``module.forward``, or another method: moves inputs to the module's device and streams its weights while
    the method runs.

    The module is referenced weakly, to avoid a reference cycle.

    Args:
        module: The module whose forward is replaced.
        device: Execution device; inputs are moved there. None leaves inputs on their devices.
        skip_keys: Keyword arguments that are never moved.
        method: The name of the method that is replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None,
        skip_keys: Collection[str] | None,
        method: str = "forward",
    ) -> None:
        self._module = weakref.ref(module)
        self.method = method
        self._own: Callable[..., Any] | None = module.__dict__.get(method)
        self._function: Callable[..., Any] = getattr(type(module), method)
        functools.update_wrapper(self, self._own or self._function)
        self.__dict__.pop("__wrapped__")
        self.__signature__ = inspect.signature(getattr(module, method))
        self.device = device
        self.skip_keys = set(skip_keys or ())
        self.blocks: list[tuple[Streamer, Block]] = []
        self.compute: Compute | None = None
        """Replaces the module's own forward, as for experts; None: the module's own."""
        self.host_or_device: HostOrDevice | None = None
        """Decides the device of each call; None: always `device`."""
        self.ahead: tuple[ReadAhead, MappedBlock] | None = None
        """Pages in mapped weights before the module computes with them."""
        self.parts: Parts | None = None
        """The parts of the module, if further ones are looked for."""
        self.weights_on_host = False
        """Whether the module's own weights stay on the host beside an accelerator, as offloaded tensors."""
        self.returns_to_input = False
        self.moved_inputs = False
        """Whether inputs have been moved from another device."""
        self.output_device: torch.device | None = None
        self.output_dtype: torch.dtype | None = None
        self.written_device: torch.device | None = None
        """Device for tensors that the module puts into containers among its arguments; None: they stay."""
        self.stage: int | None = None
        """The number of the stage that the module is in, where parts are resident on several accelerators."""
        self.transform_budgets: TransformBudgets | None = None
        """Of a call of the whole model: holds it to the budgets of devices where it is transformed or unplanned."""
        self.unplanned: MeasuredCalls[Any] | None = None
        """Of a call of the whole model: tells whether it is beyond the plan."""
        self.unplanned_part: tuple[TransformBudgets, MeasuredCalls[Any]] | None = None
        """Of a call of a part, or of a method beside forward, from outside the model: tells whether it is beyond the
        plan, and holds it to budgets."""
        self.admission: Admission | None = None
        """Has calls from outside the model wait until budgets have room for them; None: nothing waits."""

    def attach(self) -> None:
        """Replace the module's forward."""
        leave_untraced(UNTRACED)
        self.module.__dict__[self.method] = self

    def detach(self) -> None:
        """Restore the module's own forward."""
        module = self._module()
        if module is None:
            return
        if module.__dict__.get(self.method) is self:
            if self._own is not None:
                module.__dict__[self.method] = self._own
            else:
                module.__dict__.pop(self.method)
        elif module.__dict__.get(REPLACED_BY_HOOK) is self:  # a hook that was added later stays
            module.__dict__[REPLACED_BY_HOOK] = self._own or self._function.__get__(module)

    def __getattr__(self, name: str) -> Any:
        """Refuse to give the code of the forward, which `torch.export` and `torch.jit.script` ask for."""
        if name in ("__code__", "__globals__"):
            raise NotTracedError(NOT_TRACED)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def replaced(self) -> Callable[..., Any] | None:
        """The module's own method that this one replaced; None if it had only its class's."""
        return self._own

    def replace_own(self, forward: Callable[..., Any] | None) -> None:
        """Have this call `forward`, or the class's (None), in place of what it replaced."""
        self._own = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self.admission is not None
            and not self.admission.inside.now
            and (forwards := self.forwards_of(args, kwargs, self.admission.most))
        ):
            return self.admission.run(forwards, self._call_admitted, args, kwargs)
        if self.parts is not None and not self.parts.are_current():
            self.parts.find_added(self.parts)
        if self.stage is not None and (step := running_step()) is not None:
            step.enter(self.stage)
        source = first_tensor((args, kwargs)) if self.returns_to_input else None
        written = WrittenContainers((args, kwargs)) if self.written_device is not None else None
        if self.host_or_device is not None:
            output = self._run_on_chosen_device(self.host_or_device, args, kwargs)
        elif self.device is None or (
            are_all_on(args, self.device) and (not kwargs or are_all_on(kwargs.values(), self.device))
        ):
            output = self._run(args, kwargs) if self.ahead is None else self._run_in_memory(self.ahead, args, kwargs)
        else:
            output = self._run_on(self.device, self._run_resident, args, kwargs)
        if written is not None and self.written_device is not None:
            written.bring(self.written_device, self.skip_keys)
        if self.output_dtype is not None:
            output = output.to(self.output_dtype)
        target = source.device if source is not None else self.output_device
        if target is None:
            return output
        if isinstance(output, GeneratorType):
            return (send_to_device(each, target, skip_keys=self.skip_keys) for each in output)
        return send_to_device(output, target, skip_keys=self.skip_keys)

    def forwards_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> int:
        """Return the number of planned forwards that a call counts as in `Admission`: `most` if it runs alone, 0 if it
        waits for nothing."""
        if is_transformed():
            return most
        if torch.is_grad_enabled():
            return 0
        if most == 1:
            return 1
        calls = self.unplanned if self.unplanned_part is None else self.unplanned_part[1]
        return most if calls is not None and calls.is_beyond(args, kwargs) else 1

    def _call_admitted(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call from outside the model, which has been admitted."""
        if self.unplanned_part is not None:
            budgets, calls = self.unplanned_part
            if (size := calls.size_of(args, kwargs)) is not None:
                return budgets.run(self._call_again, args, kwargs, Unplanned(calls, size))
        return self._call_again(args, kwargs)

    def _call_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return AttachedForward.__call__(self, *args, **kwargs)  # a subclass's has begun

    def _run_on(self, device: torch.device, run: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run with the arguments brought to `device`, and what is written into them brought back."""
        if self.transform_budgets is not None:
            if is_transformed():
                self.transform_budgets.check_inputs(args, kwargs, device)
            elif self.unplanned is not None and self.unplanned.size_of(args, kwargs) is not None:
                self.transform_budgets.check_inputs(args, kwargs, device, self.unplanned)
        transfer = InputTransfer(device, self.skip_keys)
        args, kwargs = transfer.send(args, kwargs)
        if not transfer.moved:
            return run(args, kwargs)
        self.moved_inputs = True
        return transfer.bring_back(run(args, kwargs))

    def _run_resident(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(args, kwargs) if self.ahead is None else self._run_in_memory(self.ahead, args, kwargs)

    def _run_on_chosen_device(self, host_or_device: HostOrDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.device is not None
        device = torch_device(HOST) if is_transformed() else host_or_device.device_of(args, kwargs, self.device)
        on_host = device != self.device
        host_or_device.move_cache(args, kwargs, device)
        run = self.plain if on_host else self._run
        return host_or_device.visit(on_host, lambda _: self._run_on(device, run, args, kwargs))

    def _run_in_memory(
        self, ahead: tuple[ReadAhead, MappedBlock], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        reader, block = ahead
        return reader.visit(block, lambda _: self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run: Compute = self.compute or self.plain
        if self.unplanned is not None and (size := self.unplanned.size_of(args, kwargs)) is not None:
            assert self.transform_budgets is not None
            run = functools.partial(self.transform_budgets.run, run, unplanned=Unplanned(self.unplanned, size))
        if torch.is_grad_enabled() or is_transformed():
            for streamer, block in self.blocks:
                run = functools.partial(run_with_gradients, streamer, block, self.module, run)
            if self.transform_budgets is not None and is_transformed():
                return self.transform_budgets.run(run, args, kwargs)
            return run(args, kwargs)
        if len(self.blocks) == 1:  # without another call: this is hot
            streamer, block = self.blocks[0]
            return streamer.run(block, run, args, kwargs)
        for streamer, block in self.blocks:
            run = functools.partial(streamer.run, block, run)
        return run(args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The module whose forward is replaced."""
        module = self._module()
        assert module is not None, "the module is gone"
        return module

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what was replaced."""
        if self._own is not None:
            return self._own(*args, **kwargs)
        return self._function(self._module(), *args, **kwargs)


def innermost_running(module: nn.Module) -> AttachedForward | None:
    """Return the innermost attachment around `module` whose forward the calling thread is in; None: there is none.

    It walks the stack: for what is rare.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is AttachedForward.plain.__code__:
            running: AttachedForward = frame.f_locals["self"]
            if any(part is module for part in running.module.modules()):
                return running
        frame = frame.f_back  # type: ignore[assignment]
    return None


class InputTransfer:
    """Moves the arguments of one call to `device`.

    Containers are rebuilt only where something in them moves. What is there several times, a tensor or a container, is
    moved once: what was one object still is.

    Args:
        device: Where tensors go.
        skip_keys: Keyword arguments, keys of mappings in them included, whose values stay where they are.

    Attributes:
        moved: Whether anything had to move.
    """

    def __init__(self, device: torch.device, skip_keys: Collection[str]) -> None:
        self._device = device
        self._skip_keys = skip_keys
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = {}
        self._containers: dict[int, tuple[Any, Any, Container, list[Any]]] = {}

    @property
    def moved(self) -> bool:
        return bool(self._tensors)

    def send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every tensor in them on the device."""
        return self._sent(args, ()), self._sent(kwargs, self._skip_keys)

    def bring_back(self, output: Any) -> Any:
        """Put what the call has written into the arguments that it was given; return `output`, with these containers
        in the place of their copies.

        Raises:
            DispatchError: A tensor was written that shares memory with another argument, whose copy has not changed.
        """
        written = [
            (source, moved)
            for reference, moved, version in self._tensors.values()
            if moved._version != version and (source := reference()) is not None
        ]
        for source, _ in written:
            self._refuse_shared(source)
        for source, moved in written:
            source.copy_(moved)
        if not self._containers:
            return output
        originals = {id(copy): original for original, copy, _, _ in self._containers.values()}
        for original, copy, container, sent in self._containers.values():
            _write_back(original, copy, container, sent)
        if id(output) in originals:
            return originals[id(output)]
        if type(output) is tuple:
            return tuple(originals.get(id(member), member) for member in output)
        return output

    def _refuse_shared(self, written: torch.Tensor) -> None:
        for reference, _, _ in self._tensors.values():
            other = reference()
            if other is not None and other is not written and share_elements(written, other):
                raise DispatchError(
                    f"a module on {self._device} was given two tensors that share memory and lie elsewhere, of shapes "
                    f"{tuple(written.shape)} and {tuple(other.shape)}, and wrote into one: it has separate copies of "
                    "them, so the other did not change. Give it one of them, or map it to the device of its caller"
                )

    def _sent(self, value: Any, skip: Collection[str]) -> Any:
        if id(value) in self._containers:
            return self._containers[id(value)][1]
        container = None if isinstance(value, PackedSequence) else open_container(value)
        if container is None:
            return value.to(self._device) if moves_itself(value) else value
        new = []
        for key, old in zip(container.keys, container.members):
            if isinstance(old, torch.Tensor):
                stays = old.device == self._device or (key in skip if isinstance(key, str) else False)
                new.append(old if stays else self._copy(old))
            elif old is None or isinstance(old, (bool, int, float, str)) or (isinstance(key, str) and key in skip):
                new.append(old)
            else:
                new.append(self._sent(old, skip))
        if all([one is old for one, old in zip(new, container.members)]):  # noqa: C419 (no generator: this is hot)
            return value
        made = container.rebuild(new)
        if _is_mutable(value):
            self._containers[id(value)] = value, made, container, new
        return made

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._tensors.get(id(tensor))
        if known is None:
            copying = _counting if torch.is_inference_mode_enabled() else copy_to
            copy = copying(tensor, self._device)
            # A tensor that nobody else holds is freed as early as without this.
            known = self._tensors[id(tensor)] = weakref.ref(tensor), copy, copy._version
        return known[1]


class WrittenContainers:
    """Moves what a call puts into the containers that it is given to the device of the code that reads them.

    Args:
        arguments: The arguments of the call, before it.
    """

    def __init__(self, arguments: Any) -> None:
        self._before: dict[int, tuple[Any, list[Any]]] = {}
        self._find(arguments)

    def _find(self, value: Any) -> None:
        container = None if id(value) in self._before else open_container(value)
        if container is None:
            return
        if _is_mutable(value):
            self._before[id(value)] = value, container.members
        for member in container.members:
            self._find(member)

    def bring(self, device: torch.device, skip_keys: Collection[str]) -> None:
        """Move what has been put into the containers since to `device`."""
        for value, before in self._before.values():
            container = open_container(value)
            assert container is not None
            known = {id(member) for member in before}
            moved = [
                member if id(member) in known else send_to_device(member, device, skip_keys=skip_keys)
                for member in container.members
            ]
            _put(value, container, moved)


def _put(value: Any, container: Container, members: list[Any]) -> None:
    """Have a mutable container hold `members` in the place of those that it was opened with."""
    for key, old, new in zip(container.keys, container.members, members, strict=True):
        if new is old:
            continue
        if dataclasses.is_dataclass(value):
            setattr(value, key, new)
        else:
            value[key] = new


def _counting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy that counts how often it is written to, as tensors of inference mode do not."""
    with torch.inference_mode(False), torch.no_grad():
        elements = spanned_elements(tensor)
        if elements == tensor.numel():
            return torch.empty_like(tensor, device=device, requires_grad=False).copy_(tensor)
        flat = torch.empty(elements, dtype=tensor.dtype, device=device).copy_(tensor.as_strided((elements,), (1,)))
        return flat.as_strided(tensor.shape, tensor.stride(), 0)


def _is_mutable(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not value.__dataclass_params__.frozen  # type: ignore[union-attr]
    return isinstance(value, (list, MutableMapping))


def _write_back(original: Any, copy: Any, container: Container, sent: list[Any]) -> None:
    """Let `original` hold what `copy` holds now: members that were sent by their originals, new ones as they are."""
    was = {id(new): old for new, old in zip(sent, container.members)}
    if isinstance(original, list):
        if len(copy) != len(sent) or any(one is not other for one, other in zip(copy, sent)):
            original[:] = [was.get(id(member), member) for member in copy]
        return
    before = dict(zip(container.keys, sent))
    if isinstance(original, MutableMapping):
        for key in [key for key in before if key not in copy]:
            del original[key]
        for key, member in copy.items():
            if key not in before or before[key] is not member:
                original[key] = was.get(id(member), member)
        return
    for field in dataclasses.fields(original):
        member = getattr(copy, field.name, None)
        if before.get(field.name) is not member:
            setattr(original, field.name, was.get(id(member), member))


class Parts:
    """The parts of a module as they were found last, to notice when one is added or replaced.

    Args:
        module: The module. It and its parts are referenced weakly, to avoid reference cycles.
        find_added: Called with this object when they are no longer what they were; sets `found`.

    Attributes:
        found: What `parts_of` returned.
    """

    def __init__(self, module: nn.Module, find_added: Callable[[Parts], None]) -> None:
        self.find_added = find_added
        self.found = parts_of(module)

    def are_current(self) -> bool:
        """Whether no part was added or replaced since."""
        for reference, names, members, keys in self.found:
            part = reference()
            if part is None or [*part._modules] != names or _children(part) != members:
                return False
            if keys is not None and _keys(part) != keys:
                return False
        return True


_Part = tuple["weakref.ref[nn.Module]", list[str], "list[weakref.ref[nn.Module]]", "list[str] | None"]
"""A module, the names in it, the modules of these names, and the keys of a dictionary of parameters."""


def parts_of(module: nn.Module) -> list[_Part]:
    """Return the parts of `module` that change when something is added to it, each with what it holds now.

    A layer without modules in it, such as a linear one, is replaced and not extended, which its parent shows.
    """
    return [
        (
            weakref.ref(part),
            [*part._modules],
            _children(part),
            _keys(part),
        )
        for part in module.modules()
        if part._modules or not part._parameters or isinstance(part, nn.ParameterDict)
    ]


def _keys(module: nn.Module) -> list[str] | None:
    return [*module._keys] if isinstance(module, nn.ParameterDict) else None


def _children(module: nn.Module) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(child) for child in module._modules.values() if child is not None]

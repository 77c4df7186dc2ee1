"""Layers with a recurrent state, in packed steps: Mamba, linear attention, short convolutions.

Such a layer mixes tokens by a state of fixed size, so the rows of a packed step cannot go through it together. Within a
step each of its modules computes every sequence's rows alone, from the sequence's own state: prompts in blocks of
:data:`~bigmodel.server.engine.kv.buffers.PROMPT_BLOCK` positions from the start of the prompt, as attention does, and
the tokens that are generated one at a time. Those of several sequences are one call of the module, always of the same
number of rows, with which no row depends on the others. So no bit depends on the rest of the batch or on how a prompt
was cut.

Modules whose calls of several tokens begin anew go on from a state by a scan of ours, where they are Mamba's
(:mod:`bigmodel.server.engine.compute.selective_scan`), or else token by token.

Modules are found by their use of transformers' cache: no list of architectures is needed. A step that raises leaves no
state that can be used: a sequence without states is computed again from its first token. States at the end of a
prompt's block may be kept for prompts that begin alike: copies, as modules write to the states that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from bigmodel.server.engine.compute.attention import AttentionCall, RaggedCache, active_cache
from bigmodel.server.engine.compute.selective_scan import scanning_forward, scans_begin_with
from bigmodel.server.engine.kv.layer_state import LayerState, StateBytes

SIZES = (2, 4, 8)
"""Numbers of rows that are tried: with more, weights are read hardly less often for each token."""

LARGE = 4096.0
"""Factor of a recurrent state whose effect on a module's output is to be seen."""


class _StateLayer(LinearAttentionLayer):
    """The cache of one module in one call, which begins with states."""

    @classmethod
    def beginning(cls, states: Seq[LayerState], rows: int, numbers: int) -> _StateLayer:
        """The layer of several sequences, or of a new one if there are no states; padded to so many rows.

        Where the same sequences were computed together before, their tensors are taken as they are.
        """
        layer = cls(number_of_states=numbers)
        if not states:
            return layer
        first = states[0]
        together = (first.rows, first.sequences) == (rows, len(states)) and all(
            state.conv is first.conv and state.recurrent is first.recurrent and state.row == row
            for row, state in enumerate(states)
        )
        for number in range(len(first.kernels)):
            if together:
                conv, recurrent = first.conv[number], first.recurrent[number]
            else:
                conv = _stacked([(state.conv[number], state.row) for state in states], rows)
                recurrent = _stacked([(state.recurrent[number], state.row) for state in states], rows)
            layer.conv_states[number], layer.recurrent_states[number] = conv, recurrent
            layer.is_conv_states_initialized[number] = conv is not None
            layer.is_recurrent_states_initialized[number] = recurrent is not None
            layer.has_previous_state[number] = True
            layer.conv_kernel_size[number] = first.kernels[number]
        return layer

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states  # not copied: nothing else writes to it
        self.is_recurrent_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return recurrent_states

    def states(self, sequences: int) -> list[LayerState]:
        """The states of so many sequences after the call."""
        kept = tuple(self.conv_states.values()), tuple(self.recurrent_states.values())
        kernels = tuple(self.conv_kernel_size.values())
        return [LayerState(*kept, kernels, row, sequences) for row in range(sequences)]


def _rows(rows: slice, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, rows]


def _picked(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Each of these rows as a sequence of one token."""
    return tensor[0].index_select(0, rows)[:, None]


def _parts(calls: Seq[AttentionCall], size: int) -> Iterator[Seq[AttentionCall]]:
    """Parts of so many, the last one of what is left."""
    for begin in range(0, len(calls), size):
        yield calls[begin : begin + size]


def _stacked(parts: Seq[tuple[torch.Tensor | None, int]], rows: int) -> torch.Tensor | None:
    """A new tensor of the rows of ``parts``, then rows of zeros. Modules write to it."""
    tensors = [tensor[row] for tensor, row in parts if tensor is not None]
    if not tensors:
        return None
    out = tensors[0].new_zeros(rows, *tensors[0].shape)
    torch.stack(tensors, out=out[: len(tensors)])
    return out


class _ModuleCache(DynamicCache):
    """What a module is given as its cache in one call: the one layer that it uses."""

    def __init__(self, layer: _StateLayer) -> None:
        super().__init__()
        self._layer = layer
        self.layers = _Anywhere(layer)


class _Anywhere(list[Any]):
    """A list with one member, which is at each index."""

    def __init__(self, member: Any) -> None:
        super().__init__([member])
        self._member = member

    def __getitem__(self, index: Any) -> Any:
        return self._member


@dataclass(frozen=True)
class MixerModule:
    """A module that uses recurrent states.

    Attributes:
        name: Its name in the model.
        layer: Index of its layer in the cache.
        numbers: How many states it has in that layer.
    """

    name: str
    layer: int
    numbers: int = 1


class _UseOfStates(DynamicCache):
    """A cache that notes which module uses recurrent states, while `running` lists the modules that compute."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.running: list[str] = []
        self.used: dict[str, MixerModule] = {}

    def begins(self, name: str, *_: object) -> None:
        """Note that a module computes: a forward pre-hook."""
        self.running.append(name)

    def ends(self, *_: object) -> None:
        """Note that the last one that began has ended: a forward hook."""
        self.running.pop()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._noted(super().get_conv_state(layer_idx, state_idx), layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._noted(super().get_recurrent_state(layer_idx, state_idx), layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        found: torch.Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return self._noted(found, layer_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        found: torch.Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return self._noted(found, layer_idx)

    def _noted(self, found: Any, layer: int) -> Any:
        numbers = int(getattr(self.layers[layer], "number_of_states", 1))
        self.used[self.running[-1]] = MixerModule(self.running[-1], layer, numbers)
        return found


def find_mixers(model: torch.nn.Module, forward: Callable[[DynamicCache], object]) -> tuple[MixerModule, ...]:
    """The modules of ``model`` that use recurrent states, seen in one ``forward`` with the cache that it is given."""
    cache = _UseOfStates(model.config)
    if not any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        return ()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(cache.begins, name)))
        handles.append(module.register_forward_hook(cache.ends))
    try:
        forward(cache)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(cache.used.values())


class KnownMixers(NamedTuple):
    """What was found out about the modules of a model with recurrent states: see `Mixers`.

    Attributes:
        modules: Those modules.
        continues: Whether they take up a state with several tokens.
        sizes: Numbers of rows with which they compute tokens of several sequences.
        states: Bytes of a sequence's states; None if they were not measured.
    """

    modules: tuple[MixerModule, ...]
    continues: bool | None = None
    sizes: tuple[int, ...] | None = None
    states: StateBytes | None = None


NO_MIXERS = KnownMixers((), states=StateBytes({}, {}))
"""Of a model without recurrent states."""


class Mixers:
    """The modules of a model that use recurrent states, computing packed steps sequence by sequence.

    Attributes:
        modules: Those modules.
        continues: Whether the modules take up a state with several tokens; else prompts go on token by token. None: it
            is found out when that first happens.
        sizes: Numbers of rows of which a sequence has the same bits wherever it is, whatever the others are. None: they
            are found out when tokens of several sequences are first computed.
        rows: The number in use: generated tokens are computed for so many sequences at once.
    """

    def __init__(self, model: torch.nn.Module, known: KnownMixers) -> None:
        self.modules, self.continues, self.sizes, _ = known
        self.rows = 1
        for found in self.modules:
            module = model.get_submodule(found.name)
            if "forward" in module.__dict__ and not isinstance(module.__dict__["forward"], _PackedForward):
                raise ValueError(f"{found.name} has another forward already, as parts streamed by themselves have")
            module.forward = _PackedForward(self, found, module)

    def compute_at_once(self, sequences: int) -> None:
        """Compute the generated tokens of so many sequences in as few calls as there can be without much padding."""
        enough = 1 << max(sequences - 1, 0).bit_length()
        self.rows = max((size for size in self.sizes or () if size <= enough), default=1)


def remove_mixers(model: torch.nn.Module) -> None:
    """Give modules that compute packed steps their own forward back."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _PackedForward):
            del module.__dict__["forward"]


class _PackedForward:
    """The forward of one module: its own outside packed steps."""

    def __init__(self, mixers: Mixers, found: MixerModule, module: torch.nn.Module) -> None:
        self._mixers = mixers
        self._module = found
        self._forward = type(module).forward.__get__(module)
        self._scanning = scanning_forward(module) or self._forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = active_cache()
        if cache is None:
            return self._forward(*args, **kwargs)
        cache.mixed.add(self._module.layer)
        return _Call(self._mixers, self._module, self._scanning, cache, args, kwargs).run()


class _Call:
    """One call of a module in a packed step."""

    def __init__(
        self,
        mixers: Mixers,
        module: MixerModule,
        forward: Callable[..., Any],
        cache: RaggedCache,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._mixers = mixers
        self._module = module
        self._forward = forward
        self._cache = cache
        self._args, self._kwargs = args, kwargs
        self._hidden: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._out: torch.Tensor | None = None
        self._others: tuple[Any, ...] | None = None
        self._states: dict[int, LayerState] = {}

    def run(self) -> Any:
        """The output of all rows: of those beyond the sequences', zeros."""
        layer = self._module.layer
        for span in self._cache.spans:
            if span.start:
                self._states[id(span.kv)] = span.kv.states[layer]
        for turn in self._cache.turns:
            generated = [call for call in turn if call.generated]
            for call in turn:
                if not call.generated:
                    self._compute_prompt(call)
            if self._mixers.sizes is None and len(generated) > 1:
                self._mixers.sizes = tuple(size for size in SIZES if self._has_same_bits(generated, size))
            for part in _parts(generated, self._mixers.rows):
                self._compute_generated(part)
        for span in self._cache.spans:
            span.kv.states[layer] = self._states[id(span.kv)]
        assert self._out is not None
        out = self._out[None]
        return out if self._others is None else (out, *self._others)

    def _compute_prompt(self, call: AttentionCall) -> None:
        """Compute a part of a prompt."""
        rows, known = slice(call.row, call.row + call.end - call.start), self._states.get(id(call.kv))
        if known is not None and self._mixers.continues is None and call.end - call.start > 1:
            self._mixers.continues = self._takes_up(rows, known)
        at_once = known is None or self._mixers.continues is not False
        out, state = self._prompt(rows, known, at_once)
        self._put(rows, out)
        self._states[id(call.kv)] = state
        if call.end in call.kv.keep_at:
            call.kv.kept.setdefault(call.end, {})[self._module.layer] = state.copy()

    def _prompt(self, rows: slice, known: LayerState | None, at_once: bool) -> tuple[torch.Tensor, LayerState]:
        """Outputs [tokens, width] of a part of a prompt behind a state, and the state after it."""
        outs = []
        step = rows.stop - rows.start if at_once else 1
        for begin in range(rows.start, rows.stop, step):
            taken = slice(begin, begin + step)
            layer = _StateLayer.beginning([] if known is None else [known], 1, self._module.numbers)
            outs.append(self._called(partial(_rows, taken), layer)[0])
            (known,) = layer.states(1)
        assert known is not None
        return torch.cat(outs), known

    def _takes_up(self, rows: slice, known: LayerState) -> bool:
        """Whether several tokens at once go on from a state. Some modules begin anew: a large state shows it."""
        at_once, one_by_one = (self._prompt(rows, known.times(LARGE), at_once)[0].float() for at_once in (True, False))
        return bool((at_once - one_by_one).abs().max() <= 0.05 * one_by_one.abs().max())

    def _compute_generated(self, calls: Seq[AttentionCall]) -> None:
        """Compute one token of each sequence, in one call."""
        states = [self._states[id(call.kv)] for call in calls]
        out, states = self._generated([call.row for call in calls], states, self._mixers.rows)
        self._put(torch.tensor([call.row for call in calls], device=out.device), out)
        self._states.update({id(call.kv): state for call, state in zip(calls, states, strict=True)})

    def _generated(
        self, places: list[int], states: Seq[LayerState], rows: int
    ) -> tuple[torch.Tensor, list[LayerState]]:
        """Outputs [sequences, width] and states of sequences whose tokens are there, from a call of ``rows``."""
        layer = _StateLayer.beginning(states, rows, self._module.numbers)
        padded = places + places[:1] * (rows - len(places))
        picked = torch.tensor(padded, device=self._hidden.device)
        out = self._called(partial(_picked, picked), layer)[: len(places), 0]
        return out, layer.states(len(places))

    def _has_same_bits(self, calls: Seq[AttentionCall], rows: int) -> bool:
        """Whether a sequence gets the same in each of so many rows, beside others and beside padding."""
        beside = [calls[row % len(calls)] for row in range(rows)]
        states = [self._states[id(call.kv)].copy() for call in beside]
        together = self._generated([call.row for call in beside], states, rows)
        for call, out, state in zip(beside, *together, strict=True):
            (own,), (alone,) = self._generated([call.row], [self._states[id(call.kv)].copy()], rows)
            pairs = zip(state.tensors(), alone.tensors(), strict=True)
            if not torch.equal(out, own) or not all(torch.equal(one, other) for one, other in pairs):
                return False
        return True

    def _called(self, taken: Callable[[torch.Tensor], torch.Tensor], layer: _StateLayer) -> torch.Tensor:
        """The output [rows, tokens, width] of the module for the rows that ``taken`` takes of its inputs."""
        args = [self._input(value, taken, layer) for value in self._args]
        kwargs = {name: self._input(value, taken, layer) for name, value in self._kwargs.items()}
        with scans_begin_with(layer.recurrent_states[0]):
            found = self._forward(*args, **kwargs)
        if isinstance(found, tuple):
            found, *others = found
            self._others = tuple(None if isinstance(each, torch.Tensor) else each for each in others)
        assert isinstance(found, torch.Tensor)
        return found

    def _input(self, value: Any, taken: Callable[[torch.Tensor], torch.Tensor], layer: _StateLayer) -> Any:
        """What the module is given in the place of an argument of the packed step."""
        if value is self._cache:
            return _ModuleCache(layer)
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == self._hidden.shape[1]:
            return taken(value)
        if isinstance(value, tuple):
            return tuple(self._input(each, taken, layer) for each in value)
        return value

    def _put(self, rows: slice | torch.Tensor, found: torch.Tensor) -> None:
        if self._out is None:
            self._out = found.new_zeros(self._hidden.shape[1], found.shape[-1])
        self._out[rows] = found

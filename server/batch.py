"""Offline generation: many prompts through the engine, without HTTP.

Every step computes one token of every running sequence, so one fetch of a streamed block serves the whole batch.
Prompts may have any lengths; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bigmodel.devices import DISK, format_size
from bigmodel.dispatch import get_plan
from bigmodel.errors import ServeError
from bigmodel.server.adapters.files import Adapter, adapters_bytes, read_adapter
from bigmodel.server.engine.budget import EngineOptions, sequences_at_once
from bigmodel.server.engine.build import build_engine
from bigmodel.server.engine.core import EngineCore
from bigmodel.server.engine.scheduling.request import Delta, Done, Event, Failed, Request, SamplingParams

Prompt = str | Sequence[int]
"""A text, or its token ids."""

Asked = tuple[Prompt, SamplingParams] | tuple[Prompt, SamplingParams, str]
"""A prompt with its sampling parameters, and the name of its adapter if it has one."""


@dataclass(frozen=True)
class Generation:
    """Generated text and tokens of one prompt, why it ended ("stop" or "length"), and the prompt's tokens."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int = 0


class _Collected:
    """A sink that collects the events of one request, and appends the request's number to `ended` at its end."""

    def __init__(self, number: int, ended: list[int]) -> None:
        self._number, self._ended = number, ended
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._finish_reason = ""
        self._prompt_tokens = 0
        self._failure: str | None = None

    def put(self, event: Event, /) -> None:
        if isinstance(event, Delta):
            self._text.append(event.text)
            self._tokens.extend(event.token_ids)
            self._finish_reason = event.finish_reason or self._finish_reason
            return
        if isinstance(event, Failed):
            self._failure = event.message
        elif isinstance(event, Done):
            self._prompt_tokens = event.prompt_tokens
        self._ended.append(self._number)

    def outcome(self) -> Generation | ServeError:
        if self._failure is not None:
            return ServeError(f"prompt {self._number}: {self._failure}")
        return Generation("".join(self._text), tuple(self._tokens), self._finish_reason, self._prompt_tokens)


def generate_batch(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    plan: Any = None,
    options: EngineOptions | None = None,
    on_step: Callable[[int, int], None] | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    adapter: str | Sequence[str] | None = None,
) -> list[Generation]:
    """Generate a continuation of every prompt, as many at once as memory and options allow.

    Args:
        model: A causal language model, dispatched or plain.
        tokenizer: Its transformers tokenizer.
        prompts: Texts, or lists of token ids.
        params: Sampling parameters, for all prompts or one for each.
        plan: The plan that gives memory for keys and values; None for the plan that the model was dispatched by.
        options: Limits of sequences, tokens and key-value memory; None for the defaults.
        on_step: Called after each step with the number of finished prompts and of all.
        adapters: Folders of LoRA adapters by name, as peft writes them. The model is as it was afterwards.
        adapter: The adapter of all prompts, or of each one; "" is the model itself. None: the only one that there is.

    Returns:
        One `Generation` per prompt, in their order. Each has the tokens it would have if generated alone; with an
        adapter, those of peft's model.

    Raises:
        ServeError: A prompt is empty or too long, the numbers of prompts and params or adapters differ, there is no
            such adapter, or the plan leaves no memory for adapters: then nothing is computed. Or computing one failed.
        CheckpointError: A file of an adapter is damaged.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ServeError(f"{len(prompts)} prompts but {len(each)} params; give one for all or one for each")
    named = _adapter_of_each(adapters or {}, adapter, len(prompts))
    read = [read_adapter(name, folder) for name, folder in (adapters or {}).items()]
    plan = _leaving_room(plan or get_plan(model), read)
    found: dict[int, Generation] = {}
    with _core(model, tokenizer, plan, options, read) as core:
        ids = [_checked(core, number, prompt) for number, prompt in enumerate(prompts)]
        for number, outcome in _outcomes(core, zip(ids, each, named, strict=True), len(ids), on_step):
            if isinstance(outcome, ServeError):
                raise outcome
            found[number] = outcome
    return [found[number] for number in range(len(prompts))]


def _adapter_of_each(
    adapters: Mapping[str, str | Path], adapter: str | Sequence[str] | None, prompts: int
) -> Sequence[str]:
    """The name of each prompt's adapter. Raises ServeError as `generate_batch`."""
    if adapter is None:
        if len(adapters) > 1:
            raise ServeError(f"say which adapter computes the prompts: {', '.join(adapters)}")
        adapter = next(iter(adapters), "")
    named = [adapter] * prompts if isinstance(adapter, str) else adapter
    if len(named) != prompts:
        raise ServeError(f"{prompts} prompts but {len(named)} adapters; give one for all or one for each")
    unknown = next((name for name in named if name and name not in adapters), None)
    if unknown is not None:
        raise ServeError(f"there is no adapter '{unknown}'; there are {', '.join(adapters) or 'none'}")
    return named


def _leaving_room(plan: Any, adapters: Sequence[Adapter]) -> Any:
    """The plan without what adapters take of each budget.

    Raises:
        ServeError: It leaves less on a device.
    """
    if plan is None or not adapters:
        return plan
    taken, devices = adapters_bytes(adapters), {}
    for key, entry in plan.devices.items():
        devices[key] = entry
        if key != DISK and entry.budget is not None:
            if entry.free < taken:
                raise ServeError(
                    f"adapters take {format_size(taken)} of device {key}, and the model's plan leaves "
                    f"{format_size(entry.free)} of {format_size(entry.budget)}; place the model with less "
                    f"max_memory there, by {format_size(taken)}"
                )
            devices[key] = replace(entry, budget=entry.budget - taken)
    return replace(plan, devices=MappingProxyType(devices))


def generate_each(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Iterable[Asked],
    *,
    plan: Any = None,
    options: EngineOptions | None = None,
    adapters: Sequence[Adapter] = (),
) -> Iterator[tuple[int, Generation | ServeError]]:
    """Yield the continuation of each prompt as soon as it ends, with its number; those that end early come first.

    Prompts are taken as there is room for them, so that there may be any number. One that is empty or too long, or
    whose computation fails, yields the error in its place; the others go on.

    Args:
        model: As for `generate_batch`, like the following.
        tokenizer: Its transformers tokenizer.
        prompts: Each with its sampling parameters, and the name of its adapter if it has one.
        plan: The plan that gives memory for keys and values, and leaves what adapters take.
        options: Limits of sequences, tokens and key-value memory.
        adapters: Those that prompts name.
    """
    options = options or EngineOptions()
    plan = plan or get_plan(model)
    with _core(model, tokenizer, plan, options, adapters) as core:
        yield from _outcomes(core, _encoded(core, prompts), 2 * sequences_at_once(plan, options))


@contextmanager
def _core(
    model: torch.nn.Module,
    tokenizer: Any,
    plan: Any,
    options: EngineOptions | None,
    adapters: Sequence[Adapter],
) -> Iterator[EngineCore]:
    """An engine's core over the model, which has no adapters and computes no step afterwards."""
    core = build_engine(model, tokenizer, plan, options or EngineOptions(), adapters=adapters).core
    try:
        yield core
    finally:
        core.close()
        if core.runner.adapters is not None:
            core.runner.adapters.remove()


def _encoded(
    core: EngineCore, prompts: Iterable[Asked]
) -> Iterator[tuple[list[int] | ServeError, SamplingParams, str]]:
    for number, (prompt, params, *adapter) in enumerate(prompts):
        ids: list[int] | ServeError
        try:
            ids = _checked(core, number, prompt)
        except ServeError as error:
            ids = error
        yield ids, params, next(iter(adapter), "")


def _outcomes(
    core: EngineCore,
    prompts: Iterable[tuple[list[int] | ServeError, SamplingParams, str]],
    at_once: int,
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, Generation | ServeError]]:
    """Yield the outcome of each prompt with its number; at most `at_once` are unfinished at any time."""
    left = enumerate(prompts)
    sinks: dict[int, _Collected] = {}
    ended: list[int] = []
    finished, exhausted = 0, False
    while True:
        while not exhausted and len(core.requests) < max(at_once, 1):
            number, (ids, params, adapter) = next(left, (-1, ([], None, "")))
            if params is None:
                exhausted = True
            elif isinstance(ids, ServeError):
                yield number, ids
            else:
                sinks[number] = _Collected(number, ended)
                core.add(Request(str(number), ids, params, sinks[number], adapter=adapter))
        if core.idle and exhausted and not ended:
            return
        if not core.idle:
            core.step()
        done, ended[:] = list(ended), []
        finished += len(done)
        if on_step is not None:
            on_step(finished, finished + len(core.requests))
        for number in done:
            yield number, sinks.pop(number).outcome()


def _checked(core: EngineCore, number: int, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        ServeError: It is empty or too long, or has a token that the model does not know.
    """
    tokens = core.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not tokens:
        raise ServeError(f"prompt {number} is empty; give it at least one token")
    if len(tokens) >= core.max_length:
        raise ServeError(
            f"prompt {number} has {len(tokens)} tokens; at most {core.max_length - 1} leave room for an answer"
        )
    wrong = next((token for token in tokens if not 0 <= token < core.vocabulary_size), None)
    if wrong is not None:
        raise ServeError(f"prompt {number} holds token {wrong}; the model knows tokens 0 to {core.vocabulary_size - 1}")
    return tokens

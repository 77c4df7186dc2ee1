"""Choose the fastest runner whose logits equal those of the model's own forward."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from bigmodel.profile.model.stage import PassedLayer
from bigmodel.server.engine.compute.host_linear import HostLinear, give_as_it_is
from bigmodel.server.engine.compute.mixers import NO_MIXERS, KnownMixers, remove_mixers
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.compute.runner import PackedRunner, PackedTokens, Runner
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV

logger = logging.getLogger(__name__)

_PROMPTS = ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 1])
_CUTS = ((0, 3), (3, 4), (4, 7))
_LONG = tuple([(3 * place + start) % 7 for place in range(PROMPT_BLOCK + 5)] for start in (0, 1, 2))
"""Prompts of more than a block: of modules with recurrent states, several calls."""
_NEXT = (1, 4)
"""Tokens behind these."""


@dataclass(frozen=True)
class RunnerChoice:
    """Which runner was chosen for a model.

    Attributes:
        packed: The packed runner, else the plain one.
        row_multiple: Of the packed one.
        cached: The plain one with the model's cache, else the one without.
        layers: Device and bytes of keys and values per position of each layer, of the packed one.
        mixers: Of its modules with recurrent states, None without any.
        by_call: Of the packed one.
    """

    packed: bool
    row_multiple: int
    cached: bool = True
    layers: tuple[tuple[str, int], ...] | None = None
    mixers: KnownMixers | None = None
    by_call: bool = False

    @classmethod
    def of(cls, runner: Runner) -> RunnerChoice:
        """The choice that led to `runner`, of texts alone or of images, too."""
        runner = getattr(runner, "inner", runner)
        if isinstance(runner, PackedRunner):
            mixers = runner.mixers
            known = None
            if mixers is not None:
                known = KnownMixers(mixers.modules, mixers.continues, mixers.sizes, runner.states)
            return cls(True, runner.row_multiple, layers=runner.layers, mixers=known, by_call=runner.by_call)
        return cls(False, runner.row_multiple, getattr(runner, "cached", True))


def choose_runner(
    model: torch.nn.Module,
    *,
    row_multiple: int | str = "auto",
    host_linear: HostLinear = "auto",
    known: RunnerChoice | None = None,
) -> Runner:
    """Return the packed runner, else the plain one with the model's cache, else the plain one without.

    Each is checked on short sequences. The check fails for models whose layers do not use transformers' attention
    interface or mix tokens outside attention, and for caches that cannot be continued in chunks. It takes several
    forwards, each of which streams what is streamed: with ``known``, what was chosen when the same model was placed by
    the same plan, nothing is checked.
    """
    if known is not None:
        if known.packed:
            return PackedRunner(
                model,
                row_multiple=known.row_multiple,
                host_linear=host_linear,
                layers=known.layers,
                mixers=known.mixers or NO_MIXERS,
                by_call=known.by_call,
            )
        return PlainRunner(model, cached=known.cached)
    previous = getattr(model.config, "_attn_implementation", None)
    whole = PlainRunner(model, cached=False)
    expected = [whole.last_logits(prompt) for prompt in _PROMPTS]
    try:
        packed = PackedRunner(model, row_multiple=row_multiple, host_linear=host_linear)
        logits, attended = packed.last_logits(_PROMPTS)
        layers = int(model.config.get_text_config().num_hidden_layers)  # type: ignore[operator, union-attr]
        layers -= sum(isinstance(module, PassedLayer) for module in model.modules())  # other processes compute these
        if attended != layers:
            reason = f"{attended} of its {layers} layers attend or mix through transformers' interfaces"
        elif not all(_close(a, b) for a, b in zip(logits, expected, strict=True)):
            reason = "its logits in a packed batch differ from those of its own forward"
        elif packed.mixers is None or _goes_on(packed, whole):
            return packed
        else:
            reason = "its logits with recurrent states that were kept differ from those of its own forward"
    except Exception as error:  # a model may raise anything: it decides the runner, and is logged
        reason = f"{type(error).__name__}: {error}"
    logger.warning("sequences are computed one by one: %s", reason)
    remove_mixers(model)
    give_as_it_is(model)
    if previous is not None:
        model.set_attn_implementation(previous)  # type: ignore[operator]
    return _plain(model, expected[1], whole)


def _goes_on(packed: PackedRunner, whole: PlainRunner) -> bool:
    """Whether the modules with recurrent states are right over several steps. They find out how they may be called."""
    expected = [whole.last_logits([*prompt, *_NEXT]) for prompt in _LONG]
    # Texts of many tokens, some of whose states went through memory in between: roundings add up.
    return all(_close(one, other, 10) for one, other in zip(_grown(packed), expected, strict=True))


def _grown(packed: PackedRunner) -> list[torch.Tensor]:
    """Logits of the last of a few tokens behind each prompt, computed step by step."""
    caches = [SequenceKV() for _ in _LONG]
    for kv, prompt in zip(caches, _LONG, strict=True):
        kv.reserve(len(prompt) + len(_NEXT))
        packed.compute([PackedTokens(kv, prompt, 0, len(prompt), 1)])
    last: list[torch.Tensor | None] = []
    for number, token in enumerate(_NEXT):
        last = packed.compute(
            [
                PackedTokens(kv, [token], len(prompt) + number, len(prompt), 1)
                for kv, prompt in zip(caches, _LONG, strict=True)
            ]
        )
    return [rows[-1] for rows in last if rows is not None]


def _plain(model: torch.nn.Module, expected: torch.Tensor, whole: PlainRunner) -> PlainRunner:
    try:
        runner = PlainRunner(model)
        cache = runner.empty_cache()
        for start, end in _CUTS:
            logits = runner.forward(_PROMPTS[1][start:end], start, cache)
        if _close(logits[-1], expected):
            return runner
        reason = "its logits with a cache continued in chunks differ from those of its own forward"
    except Exception as error:  # as above
        reason = f"{type(error).__name__}: {error}"
    logger.warning("every token recomputes its whole text, which is slow: %s", reason)
    return whole


def _close(one: torch.Tensor, other: torch.Tensor, factor: float = 1.0) -> bool:
    """Equal up to the rounding error that many layers accumulate, and so many times many tokens."""
    scale = other.float().abs().max().clamp(min=1e-6)
    tolerance = min(factor * 1e-4 if other.dtype == torch.float32 else factor * 0.05, 0.2)
    return bool((one.float() - other.float()).abs().max() <= tolerance * scale)

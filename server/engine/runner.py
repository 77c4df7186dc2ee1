"""Computing one step: tokens in, logits out.

Two runners with one face. :class:`PackedRunner` puts the new tokens of every sequence into one forward, so
that one pass over the weights serves the whole batch. :class:`PlainRunner` gives each sequence a forward of
its own with the model's own cache: slower, for models whose attention cannot be replaced.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from server.engine.attention import NAME, ragged_step, register
from server.engine.cache import RaggedCache, SequenceKV, Span
from server.engine.invariance import probe_row_multiple
from server.engine.scheduler import Grant

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """``run`` computes the granted tokens and returns, per grant, the logits asked for.

    That is [1, vocabulary] of the last token where the grant samples, [tokens, vocabulary] of all its tokens
    where the request wants the log-probabilities of its prompt, and None elsewhere.
    """

    name: str
    row_multiple: int

    def run(self, grants: Seq[Grant]) -> list[torch.Tensor | None]: ...

    def bytes_per_token(self) -> dict[str, int]: ...


def wants_all(grant: Grant) -> bool:
    """Whether the logits of all tokens of the grant are needed, not the last one's only."""
    return grant.sequence.params.prompt_logprobs and not grant.sequence.output


def input_device(model: torch.nn.Module) -> torch.device:
    """Where the model takes its tokens: the main device of a dispatched model, else where its weights are."""
    if not hasattr(model, "hf_device_map"):
        device: torch.device = model.device  # type: ignore[assignment]
        return device
    from bigmodel.dispatch.dispatched import dispatched

    found = dispatched(model)
    assert found is not None
    return found.main_device


class PackedRunner:
    """One forward per step for the whole batch.

    ``row_multiple``: the packed row is padded to a multiple of so many tokens, with which the matrix
    multiplications of this machine give a row the same bits whatever the other rows are. "auto" measures it.
    """

    name = "packed"

    def __init__(self, model: torch.nn.Module, *, row_multiple: int | str = "auto") -> None:
        register()
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        self.model = model
        self.device = input_device(model)
        self.row_multiple = probe_row_multiple(model, self.device) if row_multiple == "auto" else int(row_multiple)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, grants: Seq[Grant]) -> list[torch.Tensor | None]:
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for grant in grants:
            sequence, start = grant.sequence, grant.sequence.computed
            end = start + grant.tokens
            assert sequence.kv is not None
            spans.append(Span(sequence.kv, len(tokens), start, end, sequence.prompt_length))
            tokens += sequence.token_slice(start, end)
            positions += range(start, end)
            if wants_all(grant):
                keep += range(len(tokens) - grant.tokens, len(tokens))
            elif grant.samples:
                keep.append(len(tokens) - 1)
        logits = self._forward(tokens, positions, RaggedCache(spans), keep)
        return self._share_out(grants, logits)

    def _forward(self, tokens: list[int], positions: list[int], cache: RaggedCache, keep: list[int]) -> torch.Tensor:
        pad = -len(tokens) % self.row_multiple
        rows = keep + [0] * (max(1, -(-len(keep) // self.row_multiple)) * self.row_multiple - len(keep))
        extra = {"logits_to_keep": torch.tensor(rows, device=self.device)} if self._keeps_rows else {}
        with torch.inference_mode(), ragged_step(cache):
            logits: torch.Tensor = self.model(
                input_ids=torch.tensor([tokens + [0] * pad], device=self.device),
                position_ids=torch.tensor([positions + [0] * pad], device=self.device),
                past_key_values=cache,
                use_cache=True,
                **extra,
            ).logits[0]
        if not self._keeps_rows:
            logits = logits[rows]
        return _readable(logits[: len(keep)])

    def last_logits(self, prompts: Seq[list[int]]) -> list[torch.Tensor]:
        """The logits [vocabulary] after each of ``prompts``, all computed in one forward."""
        tokens: list[int] = []
        spans: list[Span] = []
        for prompt in prompts:
            kv = SequenceKV()
            kv.reserve(len(prompt))
            spans.append(Span(kv, len(tokens), 0, len(prompt), len(prompt)))
            tokens += prompt
        positions = [position for prompt in prompts for position in range(len(prompt))]
        ends = [span.row + span.end - 1 for span in spans]
        return list(self._forward(tokens, positions, RaggedCache(spans), ends))

    def _share_out(self, grants: Seq[Grant], logits: torch.Tensor) -> list[torch.Tensor | None]:
        shares: list[torch.Tensor | None] = []
        row = 0
        for grant in grants:
            count = grant.tokens if wants_all(grant) else int(grant.samples)
            shares.append(logits[row : row + count] if count else None)
            row += count
        return shares

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position on each device, learnt from a forward of one token."""
        kv = SequenceKV()
        kv.reserve(1)
        self._forward([0], [0], RaggedCache([Span(kv, 0, 0, 1, 1)]), [0])
        total: dict[str, int] = {}
        for layer in kv.layers():
            for tensor in kv.layer(layer):
                key = str(tensor.device)
                total[key] = total.get(key, 0) + tensor.nbytes // tensor.shape[1]
        return total


class PlainRunner:
    """A forward for each sequence, with the model's own attention and cache."""

    name = "plain"
    row_multiple = 1

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.device = input_device(model)

    def run(self, grants: Seq[Grant]) -> list[torch.Tensor | None]:
        return [self._run_one(grant) for grant in grants]

    def _run_one(self, grant: Grant) -> torch.Tensor | None:
        sequence, start = grant.sequence, grant.sequence.computed
        assert sequence.kv is not None
        if sequence.kv.own is None:
            sequence.kv.own = _empty_cache(self.model)
        logits = self._forward(sequence.token_slice(start, start + grant.tokens), start, sequence.kv.own)
        if wants_all(grant):
            return logits
        return logits[-1:] if grant.samples else None

    def _forward(self, tokens: list[int], start: int, cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.arange(start, start + len(tokens), device=self.device)[None],
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
        return _readable(logits)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of keys and values per position on each device, learnt from a forward of a few tokens."""
        tokens = 16
        cache = _empty_cache(self.model)
        self._forward([0] * tokens, 0, cache)
        total: dict[str, int] = {}
        for layer in cache.layers:
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(tensor, torch.Tensor):
                    key = str(tensor.device)
                    total[key] = total.get(key, 0) + -(-tensor.nbytes // tokens)
        return total or {str(self.device): 1}


def choose_runner(model: torch.nn.Module, *, row_multiple: int | str = "auto") -> Runner:
    """A :class:`PackedRunner` if it computes what the model computes by itself, else a :class:`PlainRunner`.

    Tried on two short sequences in one forward: a model whose layers do not go through transformers'
    attention interface, or mix tokens outside attention, shows it here.
    """
    previous = getattr(model.config, "_attn_implementation", None)
    plain = PlainRunner(model)
    prompts = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 1]]
    expected = [plain._forward(prompt, 0, _empty_cache(model))[-1] for prompt in prompts]
    try:
        packed = PackedRunner(model, row_multiple=row_multiple)
        got = packed.last_logits(prompts)
        if all(_close(a, b) for a, b in zip(got, expected, strict=True)):
            return packed
        reason = "its logits in a packed batch differ from those of its own forward"
    except Exception as error:  # any model may be given: what it raises decides, and is said
        reason = f"{type(error).__name__}: {error}"
    logger.warning("sequences are computed one by one: %s", reason)
    if previous is not None:
        model.set_attn_implementation(previous)  # type: ignore[operator]
    return plain


def _close(packed: torch.Tensor, plain: torch.Tensor) -> bool:
    """Equal up to the rounding of the dtype."""
    scale = plain.float().abs().max().clamp(min=1e-6)
    tolerance = 64 * torch.finfo(plain.dtype).eps
    return bool((packed.float() - plain.float()).abs().max() <= tolerance * scale)


def _empty_cache(model: torch.nn.Module) -> DynamicCache:
    config: Any = model.config
    return DynamicCache(config=config)


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits where tokens can be chosen: left on CUDA, brought to the host from any other accelerator."""
    return logits if logits.device.type in ("cpu", "cuda") else logits.cpu()

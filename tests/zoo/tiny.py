"""Tiny models of the architectures that transformers exports, made by shrinking their default configs.

The sizes in a config that have a common name are replaced by small ones, in the configs inside it too. Not every
architecture allows that: heads, groups and windows must divide each other. Those that do not are named where the
models are used.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bigmodel.profile.trace.inputs import MASK, padding_mask, padding_of, parameters_of
from bigmodel.profile.trace.prompt import Prompt
from bigmodel.profile.trace.uses import uses_of
from bigmodel.profile.trace.workload import Workload

from .families import FORWARD, GENERATING, OTHERS, SEEING

BATCH, PROMPT, NEW = 2, 12, 4
"""Sequences, tokens of each prompt, and tokens that are generated after it."""

NEVER = 10**6
"""A token that is never generated: no sequence ends early."""

LARGEST = 8_000_000
"""Most parameters of a model that is called tiny."""

_SIZES: dict[int, tuple[str, ...]] = {
    160: ("vocab_size",),
    128: ("max_position_embeddings", "n_positions"),
    96: (
        "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "ffn_hidden_size", "ffn_size",
        "feed_forward_size", "shared_intermediate_size", "intermediate_size_mlp", "shared_expert_intermediate_size",
    ),
    64: (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "decoder_hidden_size",
        "out_hidden_size", "word_embed_proj_dim", "hidden_dim", "n_embed", "encoder_hidden_size",
        "attention_hidden_size", "lru_width", "classifier_proj_size", "output_dim", "rnn_hidden_size",
        "text_embed_dim",
    ),
    32: (
        "moe_intermediate_size", "expert_ffn_hidden_size", "projection_dim", "image_size", "num_mel_bins",
        "moe_shared_expert_intermediate_size",
    ),
    16: ("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "attention_head_dim"),
    8: ("patch_size", "mamba_d_state", "state_size", "qk_rope_head_dim"),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    ),
    3: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
        "decoder_layers", "num_encoder_layers", "encoder_num_layers", "depth",
    ),
    2: ("num_key_value_heads", "num_experts_per_tok", "moe_top_k"),
    1: ("n_group", "topk_group", "bos_token_id"),
}  # fmt: skip
TOKENS = ("_token_id", "_token_index")
"""Suffixes of names of special tokens, which are to be in the small vocabulary."""

SMALL = {name: size for size, names in _SIZES.items() for name in names}


class NoTinyModelError(Exception):
    """An architecture has no tiny model, for the reason named."""


@dataclass(frozen=True)
class Outputs:
    """What a call returned, on the CPU.

    Attributes:
        tensors: whole numbers (generated tokens among them), and floating point numbers.
        scores: of generated text the scores of each step, (batch, tokens that may be chosen).
    """

    tensors: list[torch.Tensor]
    scores: list[torch.Tensor] = field(default_factory=list)

    def difference(self, other: Outputs, tolerance: float = 0.0) -> str:
        """Return how these outputs differ from others; empty if they do not.

        Args:
            other: what to compare with.
            tolerance: largest difference of a floating point number, relative to the largest value of its tensor. With
                one, text is compared up to the step in which rounding has another token chosen, its scores included.
                0: the bits are equal.
        """
        mine, others = self._in_common(other) if tolerance else (self._all, other._all)
        if len(mine) != len(others):
            return f"{len(mine)} outputs for {len(others)}"
        for one, another in zip(mine, others, strict=True):
            if one.dtype != another.dtype or one.shape != another.shape:
                return f"{one.dtype} {tuple(one.shape)} for {another.dtype} {tuple(another.shape)}"
            if torch.equal(torch.nan_to_num(one), torch.nan_to_num(another)):
                continue
            if not (tolerance and one.is_floating_point()):
                return f"an output of {one.dtype} differs"
            largest = another.nan_to_num().abs().max()
            relative = float((one.nan_to_num() - another.nan_to_num()).abs().max() / largest)
            if relative > tolerance:
                return f"an output differs by {relative:.2g} of its largest value"
        return ""

    @property
    def _all(self) -> list[torch.Tensor]:
        return [*self.tensors, *self.scores]

    def _in_common(self, other: Outputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs of both up to the first step whose best tokens differ."""
        for step, (one, another) in enumerate(zip(self.scores, other.scores, strict=False)):
            if not torch.equal(one.argmax(-1), another.argmax(-1)):
                return self.scores[: step + 1], other.scores[: step + 1]
        return self._all, other._all


Call = Callable[[nn.Module, str], Outputs]
"""Calls a model with inputs on a device."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model and the call that it is used by.

    Attributes:
        model: the model, in evaluation mode on the CPU.
        use: makes the call.
        used_as: "generate", "transduce" or "forward".
    """

    model: Any
    use: Call
    used_as: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        return next(self.model.parameters()).dtype  # type: ignore[no-any-return]


def shrink(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config that are to be smaller than by default, nested ones included."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            found[name] = min(SMALL[name], value)
        elif name.endswith(TOKENS) and isinstance(value, int) and value >= 150:
            found[name] = 150 + sum(each.endswith(TOKENS) for each in found) % 9
        elif isinstance(value, dict) and value.get("model_type") is not None:
            found[name] = {**shrink(value), "model_type": value["model_type"]}
    return found


def build(name: str, class_name: str) -> Any:
    """Return the tiny model of an architecture with random weights; NoTinyModelError if there is none."""
    if name in MADE_BY_HAND:
        torch.manual_seed(0)
        return MADE_BY_HAND[name]().eval()
    try:
        config = CONFIG_MAPPING[name](**shrink(CONFIG_MAPPING[name]().to_dict()))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in _new(class_name, config).parameters())
        if size > LARGEST:
            raise NoTinyModelError(f"has {size:,} parameters")
        torch.manual_seed(0)
        return _new(class_name, config).eval()
    except NoTinyModelError:
        raise
    except Exception as error:  # whatever a config or a constructor raises
        raise NoTinyModelError(f"cannot be built: {error!r}") from error


MADE_BY_HAND = {**FORWARD, **GENERATING, **SEEING, **OTHERS}


def _new(class_name: str, config: Any) -> Any:
    return getattr(transformers, class_name)._from_config(config)


def tiny(name: str, class_name: str, dtype: torch.dtype = torch.float32) -> Tiny:
    """Return the tiny model of an architecture and the first call of its conventions that it runs.

    Raises:
        NoTinyModelError: it cannot be built, or runs none of the calls.
    """
    model = build(name, class_name).to(dtype)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.update(eos_token_id=NEVER, pad_token_id=0)
    errors = []
    for prepare, used_as in ways_to_call(model):
        try:
            with torch.inference_mode():
                use = prepare()
                use(model, "cpu")
        except Exception as error:  # whatever a forward raises for inputs of another convention
            errors.append(repr(error))
        else:
            return Tiny(model, use, used_as)
    raise NoTinyModelError(f"runs no call of its conventions: {errors[-1] if errors else 'it follows none'}")


def ways_to_call(model: Any) -> Iterator[tuple[Callable[[], Call], str]]:
    """Yield what prepares each call by which a model may be used, in the order in which the planner tries them.

    Batches are padded where the model takes a mask.
    """
    workload = Workload(BATCH, PROMPT + NEW, NEW)
    for use in uses_of(model, workload):
        given = use.record.keywords  # type: ignore[attr-defined]
        if "inputs" in given:
            masks = {} if isinstance(given["inputs"], tuple) else padding_of(given["inputs"], parameters_of(model))
            if masks:
                yield partial(_forward, model, {**given["inputs"], **masks}), "forward"
            yield partial(_forward, model, given["inputs"]), "forward"
        elif "source" in given:
            yield partial(_transduce, model, given["source"]), "transduce"
        else:
            yield partial(_generate, model, given.get("media"), workload), "generate"


def _forward(model: Any, inputs: Mapping[str, torch.Tensor]) -> Call:
    return call_with(_samples(inputs, model.dtype))


def call_with(inputs: Mapping[str, torch.Tensor], method: str = "__call__") -> Call:
    """Return the call of a method with keyword arguments."""

    def use(model: nn.Module, device: str) -> Outputs:
        return Outputs(tensors_in(getattr(model, method)(**{name: value.to(device) for name, value in inputs.items()})))

    return use


def _transduce(model: Any, source: Mapping[str, torch.Tensor]) -> Call:
    model.generation_config.decoder_start_token_id = 1
    masks = {MASK: padding_mask(*source["input_ids"].shape)} if "input_ids" in source else {}
    return partial(_generated, inputs={**_samples(source, model.dtype), **masks}, new_tokens=NEW)


def _generate(model: Any, media: Mapping[str, torch.Tensor] | None, workload: Workload) -> Call:
    ids = torch.randint(3, 140, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    if media is None:
        return partial(_generated, inputs={"input_ids": ids, MASK: padding_mask(*ids.shape)})
    session: Any = _PromptSession(model, workload)
    prompt = Prompt.with_media(session, model.config, media, workload.prompt_length)
    inputs = {"input_ids": prompt.ids, MASK: padding_mask(*prompt.ids.shape), **prompt.media}
    accepted = {*parameters_of(model), MASK}
    return partial(_generated, inputs={name: value for name, value in inputs.items() if name in accepted})


@dataclass(frozen=True)
class _PromptSession:
    """What `Prompt` asks of a session, with real tensors."""

    model: Any
    workload: Workload

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def sequences(self) -> int:
        return self.workload.batch_size

    def accepts(self, name: str) -> bool:
        return name in parameters_of(self.model)

    def fake(self, value: Any, dtype: torch.dtype = torch.float32) -> Any:
        return _samples(value, dtype) if isinstance(value, Mapping) else value


def _samples(inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: _sample(value, dtype) for name, value in inputs.items()}


def _sample(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.rand(value.shape, generator=random).to(dtype) if value.device.type == "meta" else value


def _generated(model: Any, device: str, inputs: Mapping[str, torch.Tensor], new_tokens: int = NEW + 1) -> Outputs:
    """Return the tokens that a model generates greedily, and the scores of each step.

    A decoder is planned for reading a whole context, its last token too. `generate` does not read the last token that
    it generates, so it may generate one more; a decoder behind an encoder is planned for those that it reads.
    """
    scores: list[torch.Tensor] = []
    asked = {"max_new_tokens": new_tokens, "do_sample": False}
    given = {name: value.to(device) for name, value in inputs.items()}
    tokens = model.generate(**given, **asked, logits_processor=[_Recording(scores)])
    return Outputs([tokens.cpu()], scores)


class _Recording:
    """Keeps the scores of each step on the CPU; changes nothing."""

    def __init__(self, scores: list[torch.Tensor]) -> None:
        self.scores = scores

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.cpu())
        return scores


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an output on the CPU, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu()]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [each for member in value for each in tensors_in(member)]
    return tensors_in(list(vars(value).values())) if hasattr(value, "__dict__") else []


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this thread if the block takes longer."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

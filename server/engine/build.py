"""Build an engine for a model: runner, memory budget, scheduler, thread."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from bigmodel.devices import HOST, format_size
from bigmodel.errors import ServeError
from bigmodel.profile.model.mtp import borrow, is_head
from bigmodel.server.adapters.files import Adapter
from bigmodel.server.adapters.rows import Adapters, check_parts
from bigmodel.server.engine.budget import (
    EngineOptions,
    KVBudget,
    StateRoom,
    kv_budget,
    positions_of_attention,
    positions_of_slots,
    sequences_at_once,
    tokens_of_a_step,
)
from bigmodel.server.engine.compute.choose_runner import RunnerChoice, choose_runner
from bigmodel.server.engine.compute.draft import Drafter, ModelDrafter
from bigmodel.server.engine.compute.encoder import EncoderRunner, generates
from bigmodel.server.engine.compute.media import MediaRunner, takes_images
from bigmodel.server.engine.compute.mtp import MtpDrafter
from bigmodel.server.engine.compute.planned_draft import PlannedDrafter
from bigmodel.server.engine.compute.prompt_lookup import PromptLookup
from bigmodel.server.engine.compute.runner import PackedRunner, Runner, kept_on_host
from bigmodel.server.engine.core import EngineCore, WeightFiles
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool
from bigmodel.server.engine.kv.host_pages import HostPages
from bigmodel.server.engine.kv.prefix import PrefixCache
from bigmodel.server.engine.kv.prefix_files import PrefixFiles
from bigmodel.server.engine.kv.tiers import PageTiers
from bigmodel.server.engine.prefix_identity import prefix_identity
from bigmodel.server.engine.scheduling.request import Observer
from bigmodel.server.engine.scheduling.scheduler import Scheduler
from bigmodel.server.engine.stages import steps_in_flight
from bigmodel.server.text.codec import TextCodec

logger = logging.getLogger(__name__)


def build_engine(
    model: torch.nn.Module,
    tokenizer: Any,
    plan: Any = None,
    options: EngineOptions | None = None,
    *,
    draft_model: torch.nn.Module | None = None,
    checkpoint: str | None = None,
    adapters: Seq[Adapter] = (),
    known_runner: RunnerChoice | None = None,
    observer: Observer | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Engine:
    """An engine for ``model``, not started yet; ``draft_model`` proposes tokens that the model verifies.

    ``checkpoint`` is what `checkpoint_digest` returned of the model's, for options with a ``prefix_folder``. For
    ``around_step`` see :class:`.engine.Engine`. ``adapters`` are those that requests may name.
    ``known_runner`` is what was chosen for the model before, see `choose_runner`.
    """
    options = options or EngineOptions()
    model.eval()
    runner = (
        choose_runner(model, row_multiple=options.row_multiple, host_linear=options.host_linear, known=known_runner)
        if generates(model)
        else EncoderRunner(model)
    )
    if adapters:
        runner.adapters = make_adapters(model, adapters, runner)
    sequences = sequences_at_once(plan, options)
    drafter = as_planned(make_drafter(model, draft_model, options, runner), plan, options, sequences)
    if isinstance(runner, PackedRunner) and plan is not None:
        proposed = 0 if drafter is None else options.prompt_lookup or options.draft_tokens
        runner.logits_at_once = sequences * (1 + proposed)
    gathered = runner.gathered_per_token() if isinstance(runner, PackedRunner) else {}
    keeps_prefixes = options.prefix_cache and isinstance(runner, PackedRunner)
    room = state_room(runner, sequences, keeps_prefixes)
    unplanned = None if room is None else room.unplanned
    budget = kv_budget([runner] if drafter is None else [runner, drafter], plan, options, gathered, unplanned)
    budget, kept = (budget, None) if room is None else budget.without_states(room)
    limits = [budget.tokens, positions_of_slots(plan), *([] if options.kv_tokens is None else [options.kv_tokens])]
    pool = TokenPool(min(limits) // PROMPT_BLOCK * PROMPT_BLOCK)
    arena = kv_arena(runner, pool.capacity, budget.in_ram)
    prefix = PrefixCache(pool, enabled=keeps_prefixes, states=kept)
    if options.prefix_folder is not None:
        prefix.adapters = {adapter.name: adapter.digest for adapter in adapters}
        prefix.files = prefix_files(options, checkpoint, tokenizer, plan, runner, budget, enabled=prefix.enabled)
    scheduler = Scheduler(
        pool,
        prefix,
        max_sequences=sequences,
        max_batch_tokens=tokens_of_a_step(plan, options, budget.in_ram),
        new_kv=SequenceKV if arena is None else partial(PagedKV, arena),
    )
    codec = tokenizer if isinstance(tokenizer, TextCodec) else TextCodec(tokenizer)
    # A tokenizer may have more tokens than the model; those cannot be computed.
    codec.vocabulary_size = min(codec.vocabulary_size, vocabulary_size(model))
    core = EngineCore(
        MediaRunner(runner, model) if takes_images(model) and generates(model) else runner,
        scheduler,
        codec,
        observer or Observer(),
        eos_ids=end_tokens(model, tokenizer),
        max_length=min(_longest(model, codec, plan, runner, options), pool.capacity),
        vocabulary_size=vocabulary_size(model),
        drafter=drafter,
        in_flight=steps_in_flight(model, runner, drafter, options),
        check_weights=WeightFiles(model, draft_model).check,
    )
    return Engine(
        core,
        max_requests=sequences + options.max_queue,
        kv_bytes_per_token=budget.bytes_per_token,
        on_failure=on_failure,
        around_step=around_step,
        pages=None if arena is None else arena.host,
    )


def state_room(runner: Runner, sequences: int, prefixes: bool) -> StateRoom | None:
    """Recurrent states of so many sequences, and of as many prompts if there is a cache of prefixes; None of a model
    without."""
    if not isinstance(runner, PackedRunner) or runner.mixers is None:
        return None
    runner.mixers.compute_at_once(sequences)
    rows = -(-sequences // runner.mixers.rows) * runner.mixers.rows
    return StateRoom(*runner.states, sequences, rows, sequences if prefixes else 0)


def prefix_files(
    options: EngineOptions,
    checkpoint: str | None,
    tokenizer: Any,
    plan: Any,
    runner: Runner,
    budget: KVBudget,
    *,
    enabled: bool,
) -> PrefixFiles:
    """The files of the prefix cache. Raises ServeError where there can be none, or where not one block fits."""
    assert options.prefix_folder is not None
    if not enabled:
        raise ServeError("a folder for the prefix cache needs the prefix cache, and a model computed in packed batches")
    if isinstance(runner, PackedRunner) and runner.mixers is not None:
        raise ServeError(
            "a folder for the prefix cache holds keys and values, and this model has recurrent states, too"
        )
    if checkpoint is None:
        raise ServeError(
            "a folder for the prefix cache needs a model from a checkpoint: its files say whose blocks fit"
        )
    block = PROMPT_BLOCK * sum(budget.bytes_per_token.values())
    if block > options.prefix_folder_bytes:
        raise ServeError(
            f"{format_size(options.prefix_folder_bytes)} for the prefix cache's files do not hold one block of "
            f"{PROMPT_BLOCK} tokens: {format_size(block)}; give more"
        )
    codec = getattr(tokenizer, "tokenizer", tokenizer)
    identity = prefix_identity(checkpoint, codec, plan, runner, budget.bytes_per_token)
    return PrefixFiles(options.prefix_folder, options.prefix_folder_bytes, identity)


def kv_maker(runner: Runner, positions: int, in_ram: int | None = None) -> Callable[[], SequenceKV]:
    """Return the constructor of a sequence's KV cache: pages of one arena on accelerators, else its own buffers."""
    arena = kv_arena(runner, positions, in_ram)
    return SequenceKV if arena is None else partial(PagedKV, arena)


def kv_arena(runner: Runner, positions: int, in_ram: int | None = None) -> KVArena | None:
    """Return an arena with pages for so many positions, where any layer's are on an accelerator, or fetched to one.

    Args:
        runner: Computes the layers.
        positions: Of all pages.
        in_ram: Positions of those on the host that RAM has memory for; None: all.
    """
    if not isinstance(runner, PackedRunner):
        return None
    pages = host_pages(runner, positions, in_ram)
    if pages is None and all(torch.device(device).type == HOST for device, _ in runner.layers):
        return None
    return KVArena(positions, pages)


def host_pages(runner: PackedRunner, positions: int, in_ram: int | None = None) -> HostPages | None:
    """Return pages on the host for the layers whose keys and values the plan of a dispatched model has there."""
    kept = kept_on_host(runner.model)
    if kept is None or not kept.layers:
        return None
    tiers = None
    if in_ram is not None and in_ram < positions and kept.older is not None:
        largest = max(nbytes for device, nbytes in runner.layers if device == HOST)
        pages, frames = positions // PROMPT_BLOCK, in_ram // PROMPT_BLOCK
        tiers = PageTiers(pages, frames, kept.layers, largest, kept.older)
    found = HostPages(positions, kept.layers, kept.slots, kept.allocate, tiers)
    kept.others.append(found.stats)
    kept.pages_in_ram = partial(_in_ram, weakref.ref(found))
    return found


def _in_ram(pages: weakref.ref[HostPages]) -> int:
    found = pages()
    return 0 if found is None else found.nbytes


def make_adapters(model: torch.nn.Module, adapters: Seq[Adapter], runner: Runner) -> Adapters:
    """Return the adapters of ``model``. Raises ServeError for one that is not the model's, or a model that has none."""
    _check_kind(model)
    mixers = runner.mixers.modules if isinstance(runner, PackedRunner) and runner.mixers else ()
    for adapter in adapters:
        inside = [part for part in adapter.parts for mixer in mixers if part.startswith(f"{mixer.name}.")]
        if inside:
            raise ServeError(
                f"adapter {adapter.name} changes {inside[0]} and {len(inside) - 1} more modules with recurrent states; "
                "those of other modules are served"
            )
    return Adapters(model, adapters, runner.row_multiple)


def check_adapters(model: torch.nn.Module, adapters: Seq[Adapter]) -> None:
    """Check adapters before their model is loaded: ``model`` may be on meta. Raises ServeError as `make_adapters`."""
    _check_kind(model)
    for adapter in adapters:
        check_parts(model, adapter)


def _check_kind(model: torch.nn.Module) -> None:
    if not generates(model) or takes_images(model):
        raise ServeError(f"adapters of {type(model).__name__} are not served: those of models of text alone are")


def make_drafter(
    model: torch.nn.Module, draft_model: torch.nn.Module | None, options: EngineOptions, runner: Runner
) -> Drafter | None:
    """Return the drafter of ``draft_model``, which may be the model's MTP head, or that of prompt lookup; None without.

    Raises ServeError for a draft model that cannot be used, and for both.
    """
    if draft_model is None and not options.prompt_lookup:
        return None
    if draft_model is not None and options.prompt_lookup:
        raise ServeError("a draft model and prompt lookup both propose tokens; give one of them")
    if not isinstance(runner, PackedRunner):
        raise ServeError(
            "proposed tokens need a model that is computed in packed batches; this one is computed one by one"
        )
    if runner.mixers is not None:
        raise ServeError("proposed tokens that are wrong cannot be taken out of this model's recurrent states")
    if draft_model is None:
        return PromptLookup(options.prompt_lookup)
    if is_head(draft_model):
        borrow(draft_model, model, runner.device)
        return MtpDrafter(model, draft_model.eval(), options.draft_tokens, host_linear=options.host_linear)
    if vocabulary_size(draft_model) != vocabulary_size(model):
        raise ServeError(
            f"the draft model has {vocabulary_size(draft_model)} tokens, the model {vocabulary_size(model)}; "
            "they must have the same vocabulary"
        )
    return ModelDrafter(
        draft_model.eval(),
        options.draft_tokens,
        max_length=context_length(draft_model),
        host_linear=options.host_linear,
    )


def as_planned(drafter: Drafter | None, plan: Any, options: EngineOptions, sequences: int) -> Drafter | None:
    """Return a drafter that proposes where the plan predicts a gain; None where it never does for up to so many
    sequences.

    Without a plan that says so, or where options force it, it proposes in each step.
    """
    speculation = getattr(plan, "speculation", None)
    if drafter is None or speculation is None or options.force_speculation:
        return drafter
    if speculation.pays(sequences):
        return PlannedDrafter(drafter, speculation)
    logger.warning("%s; --force-speculation turns it on", speculation.describe())
    return None


def end_tokens(model: torch.nn.Module, tokenizer: Any) -> frozenset[int]:
    """End-of-text tokens of the generation config and of the tokenizer."""
    found: set[int] = set()
    config = getattr(model, "generation_config", None)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    for value in (getattr(config, "eos_token_id", None), getattr(inner, "eos_token_id", None)):
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(token) for token in found)


def _longest(model: torch.nn.Module, codec: TextCodec, plan: Any, runner: Runner, options: EngineOptions) -> int:
    """Most tokens of a text: the options' number, else the model's context. Of whole texts in one forward, no more than
    the model, the tokenizer and the plan are made for; nor more than attention has memory for."""
    longest = context_length(model)
    if isinstance(runner, PackedRunner) and runner.by_call:
        most = positions_of_attention(plan)
        if most < min(longest, options.max_length or longest):
            logger.info("texts have %d tokens at most: attention to more takes more memory than was planned", most)
        return min(options.max_length or longest, most)
    if not isinstance(runner, EncoderRunner):
        return options.max_length or longest
    for name, module in model.named_modules():
        # Positions after the padding's are counted from behind it: RoBERTa and its like have fewer than they name.
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding) and module.padding_idx:
            longest = min(longest, module.num_embeddings - module.padding_idx - 1)
    known = int(getattr(codec.tokenizer, "model_max_length", longest))
    return min(
        longest, known, options.max_length or longest, (plan.context_length if plan is not None else 0) or longest
    )


def context_length(model: torch.nn.Module) -> int:
    """The model's maximum positions; 2**20 where its config names none."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def vocabulary_size(model: torch.nn.Module) -> int:
    """Width of the model's logits."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return int(config.vocab_size)

"""`bigmodel generate --batch-file`: the prompts of a file, as many at once as generate the most tokens per second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .generate import peaks
from .interrupts import INTERRUPTED

if TYPE_CHECKING:
    from bigmodel.plan import Plan
    from bigmodel.server.batch_file import AnswerFile, PromptFile
    from bigmodel.server.engine import SamplingParams
    from bigmodel.server.loading import Loaded, LoadOptions
    from bigmodel.server.text.codec import TextCodec


def generate_file(
    model: str,
    prompts: Path,
    answers: Path,
    params: SamplingParams,
    options: LoadOptions,
    adapters: Mapping[str, str],
    batch_size: int | None,
    context: int | None,
    quiet: bool,
    steps_in_flight: int | None = None,
) -> None:
    """Append the answers to a file of prompts to a file of answers, but those that it has already.

    Args:
        model: A folder or a Hub id.
        prompts: The file of prompts.
        answers: The file of answers; created if it is not there.
        params: Sampling parameters of prompts that have none of their own.
        options: How the model is loaded.
        adapters: Folders of LoRA adapters by name.
        batch_size: Prompts at once; None for the fastest.
        context: Tokens of a prompt and its answer, at most; None for those of the longest.
        quiet: Print nothing.
        steps_in_flight: Steps computed at once over several accelerators; None for as many as the plan finds fastest.

    Raises:
        ServeError: A line of a file is not what it should be, or an adapter is not, or steps in flight do not go with
            the model; nothing is computed then.
        typer.Exit: Some prompts have an error in the place of an answer, or Ctrl-C ended the run.
    """
    from bigmodel.server.batch_file import PromptFile, answers_in
    from bigmodel.server.loading import load_tokenizer
    from bigmodel.server.text.codec import TextCodec

    asked = PromptFile(prompts)
    total = sum(1 for _ in asked)
    with answers_in(answers, asked) as written:
        left = total - len(written.done)
        if not left:
            typer.echo(f"all {total} prompts have their answers in {answers}", err=True)
            return
        codec = TextCodec(load_tokenizer(model, options.get("revision"), options.get("trust_remote_code", False)))
        work = _measured(asked, written, codec, params, [*adapters], context)
        loaded = _load(model, options, adapters, batch_size, work)
        run = _Counts()
        try:
            with _progress(left, quiet) as advance:
                _answer(asked, written, loaded, codec, params, work, run, advance, steps_in_flight)
        except KeyboardInterrupt:
            typer.echo(f"{len(written.done)} of {total} prompts answered; the same command goes on with them", err=True)
            raise typer.Exit(INTERRUPTED) from None
    if not quiet:
        typer.echo(f"{run.summary(total, work.batch_size or loaded.plan.batch_size)}, {peaks()}")
    if run.failed:
        typer.echo(f"{run.failed} prompts have an error in the place of an answer, see {answers}", err=True)
        raise typer.Exit(1)


@dataclass(frozen=True)
class _RemainingWork:
    """Remaining work: tokens of the longest prompt with its answer, of the longest answer, and prompts."""

    context: int
    new_tokens: int
    prompts: int
    batch_size: int | None = None


@dataclass
class _Counts:
    """Counts of one run."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def summary(self, total: int, batch_size: int) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.answered} of {total} prompts answered, {self.tokens} tokens, {rate:.2f} tokens/s, "
            f"{batch_size} at once"
        )


def _measured(
    asked: PromptFile,
    written: AnswerFile,
    codec: TextCodec,
    params: SamplingParams,
    adapters: Sequence[str],
    context: int | None,
) -> _RemainingWork:
    """Return the shape of the prompts without an answer. Those beyond `context` will have an error."""
    from bigmodel.errors import ServeError
    from bigmodel.server.engine.kv.buffers import GROWTH

    longest, new_tokens, count = 2, 1, 0
    for name, line in asked:
        if name in written.done:
            continue
        wanted = line.params(params).max_tokens
        try:
            line.adapter_of(adapters)
            tokens = len(line.ids(codec)) + wanted
        except ServeError as error:
            raise ServeError(f"{asked.path}: prompt {name!r}: {error}") from error
        longest, new_tokens, count = max(longest, tokens), max(new_tokens, wanted), count + 1
    longest = longest if context is None else min(longest, context)
    return _RemainingWork(-(-longest // GROWTH) * GROWTH, min(new_tokens, longest - 1), count)


def _load(
    model: str, options: LoadOptions, adapters: Mapping[str, str], batch_size: int | None, work: _RemainingWork
) -> Loaded:
    from bigmodel.server.adapters.files import adapters_bytes, read_adapter
    from bigmodel.server.engine.budget import DEFAULT_SEQUENCES
    from bigmodel.server.loading import load, without_adapters

    if options.get("device_map") != "auto" or options.get("trust_remote_code"):
        options["batch_size"], options["context_length"] = (
            batch_size or min(work.prompts, DEFAULT_SEQUENCES),
            work.context,
        )
        return load(model, adapters=adapters, **options)
    if adapters:
        taken = adapters_bytes(read_adapter(name, folder) for name, folder in adapters.items())
        options["max_memory"] = without_adapters(options.get("max_memory"), taken)
    found = _planned(model, options, batch_size, work)
    kept: Any = {name: options[name] for name in ("revision", "offload_folder") if name in options}
    return load(model, adapters=adapters, device_map=found, **kept)


def _planned(model: str, options: LoadOptions, batch_size: int | None, work: _RemainingWork) -> Plan:
    """Return the plan of a batch size, or of the one that generates the most tokens per second."""
    from bigmodel.plan import make_plan
    from bigmodel.plan.result.budgets import device_type_of, read_budgets
    from bigmodel.plan.search.batch import best_batch
    from bigmodel.profile import profile_source

    budgets = options.get("max_memory")

    def plan_at(size: int) -> Plan:
        profile = profile_source(
            model,
            dtype=options.get("dtype", "auto"),
            revision=options.get("revision"),
            batch_size=size,
            context_length=work.context,
            new_tokens=work.new_tokens,
            device_type=device_type_of(read_budgets(budgets)),
            host_kernels=options.get("host_kernels", "exact"),
            padded=False,
        )
        return make_plan(
            profile,
            budgets,
            objective="throughput" if batch_size is None else None,
            offload=options.get("offload", "stream"),
            offload_dtype=options.get("offload_dtype"),
            per_pass=False,  # the engine holds keys and values itself
        )

    return plan_at(batch_size) if batch_size is not None else best_batch(plan_at, most=work.prompts)


def _answer(
    asked: PromptFile,
    written: AnswerFile,
    loaded: Loaded,
    codec: TextCodec,
    params: SamplingParams,
    work: _RemainingWork,
    run: _Counts,
    advance: Callable[[], None],
    steps: int | None,
) -> None:
    from bigmodel.errors import ServeError
    from bigmodel.server.batch import generate_each
    from bigmodel.server.engine import EngineOptions

    size = loaded.plan.batch_size
    names: dict[int, str | int] = {}
    answered = frozenset(written.done)
    adapters = [adapter.name for adapter in loaded.adapters]

    def prompts() -> Iterator[tuple[list[int], SamplingParams, str]]:
        for name, line in asked:
            if name not in answered:
                names[len(names)] = name
                ids, chosen = line.ids(codec), line.params(params)
                room = max(work.context - len(ids), 1)
                yield ids, replace(chosen, max_tokens=min(chosen.max_tokens, room)), line.adapter_of(adapters)

    limits = EngineOptions(
        size, size * work.context, max_queue=2 * size, max_length=work.context, steps_in_flight=steps
    )
    began = time.perf_counter()
    outcomes = generate_each(loaded.model, codec, prompts(), plan=loaded.plan, options=limits, adapters=loaded.adapters)
    for number, outcome in outcomes:
        written.append(names[number], outcome)
        if isinstance(outcome, ServeError):
            run.failed += 1
        else:
            run.answered, run.tokens = run.answered + 1, run.tokens + len(outcome.token_ids)
        run.seconds = time.perf_counter() - began
        advance()


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show how many prompts are answered, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Prompts", total=total)
        yield lambda: progress.advance(task)

"""`bigmodel generate`: streams generated text, then reports speed and peak memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import model_options as shared

if TYPE_CHECKING:
    from bigmodel.server import Engine
    from bigmodel.server.engine import Event, Request


def generate(
    model: shared.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads it from standard input.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Prompt and output in tokens that memory is planned for (default: 2048).")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Format PROMPT as a user message with the chat template.")] = False,
    max_memory: shared.Budgets = None,
    device_map: shared.DeviceMap = "auto",
    dtype: shared.DType = "auto",
    offload: shared.Offload = "stream",
    offload_dtype: shared.OffloadDType = None,
    host_kernels: shared.HostKernels = "exact",
    offload_folder: shared.OffloadFolder = None,
    revision: shared.Revision = None,
    trust_remote_code: shared.RemoteCode = False,
    draft_model: shared.DraftModel = None,
    draft_tokens: shared.DraftTokens = None,
    speculate: shared.Speculate = None,
    prompt_lookup: shared.PromptLookup = 0,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of a LoRA adapter that computes the answer; with --batch-file several, each with the name of "
            "its folder or as NAME=FOLDER."
        ),
    ] = None,
    force_speculation: shared.ForceSpeculation = False,
    quiet: Annotated[bool, typer.Option(help="Print the text only.")] = False,
    batch_file: Annotated[
        Path | None,
        typer.Option(
            help="In place of PROMPT: a .jsonl file of prompts, one object a line with 'prompt' or 'messages'."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --batch-file: the .jsonl file of answers. A second run goes on with it.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="With --batch-file: prompts at once. Default: the fastest by prediction."),
    ] = None,
    steps_in_flight: shared.InFlight = None,
) -> None:
    """Continue PROMPT with MODEL; print the text as it is generated, then speed and peak memory on one line.

    With --batch-file: continue many prompts, as many at once as is fastest within the budgets.
    """
    from bigmodel.server.engine import EngineOptions, Request, SamplingParams, build_engine
    from bigmodel.server.engine.kv.buffers import GROWTH
    from bigmodel.server.loading import LoadOptions, load_with_draft, load_with_head, parse_max_memory
    from bigmodel.server.models.named import adapter_folders
    from bigmodel.server.text.codec import TextCodec

    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed=seed, stop=tuple(stop or ()))
    drafted = shared.tokens_drafted(draft_tokens, draft_model, speculate)
    options = LoadOptions(
        device_map=device_map,
        max_memory=parse_max_memory(max_memory),
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        offload=offload,
        offload_dtype=offload_dtype,
        host_kernels=host_kernels,
        offload_folder=offload_folder,
        padded=False,
        draft_tokens=prompt_lookup or drafted,
        prefill_chunk_size="auto",
    )
    adapters = adapter_folders(lora or ())
    if any(given is not None for given in (batch_file, output, batch_size, steps_in_flight)):
        from .generate_file import generate_file

        if batch_file is None or output is None:
            raise typer.BadParameter(
                "--batch-file, --output, --batch-size and --steps-in-flight go together: give the files of both"
            )
        if prompt is not None or chat or draft_model is not None or speculate is not None:
            raise typer.BadParameter(
                "PROMPT, --chat, --draft-model and --speculate do not apply to --batch-file; remove them"
            )
        generate_file(model, batch_file, output, params, options, adapters, batch_size, context, quiet, steps_in_flight)
        return
    if prompt is None:
        raise typer.BadParameter("give PROMPT, or --batch-file and --output")
    if len(adapters) > 1:
        raise typer.BadParameter(
            "one adapter computes PROMPT; give one --lora, or --batch-file whose lines name theirs"
        )
    text = _text(prompt)
    # Keys and values grow by so many tokens.
    options["context_length"] = None if context is None else -(-context // GROWTH) * GROWTH
    if speculate is None:
        loaded = load_with_draft(model, draft_model, adapters=adapters, **options)
    else:
        loaded = load_with_head(model, adapters=adapters, **options)
    codec = TextCodec(loaded.tokenizer)
    if chat:
        text = codec.render_chat([{"role": "user", "content": text}])
    ids = codec.encode(text, add_special_tokens=not chat)
    # With one stream, batch invariance needs no row padding.
    limits = EngineOptions(
        1,
        max_queue=0,
        prefix_cache=False,
        row_multiple=1,
        draft_tokens=drafted or EngineOptions.draft_tokens,
        prompt_lookup=prompt_lookup,
        force_speculation=force_speculation,
    )
    engine = build_engine(
        loaded.model, codec, loaded.plan, limits, draft_model=loaded.draft_model, adapters=loaded.adapters
    )
    params = replace(params, max_tokens=_max_new_tokens(len(ids), max_tokens, engine))
    if not quiet and loaded.plan is not None and loaded.plan.speculation is not None and not force_speculation:
        typer.echo(loaded.plan.speculation.describe(), err=True)
    sink = _Events()
    summary = _run(engine, Request("cli", ids, params, sink, adapter=next(iter(adapters), "")), sink)
    if not quiet:
        typer.echo(f"{summary} {peaks()}")


def _text(prompt: str) -> str:
    """Return the prompt, read from standard input if it is a dash."""
    from bigmodel.errors import ServeError

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise ServeError(f"the prompt is not {sys.stdin.encoding} text: {error}") from error
    return text


def _max_new_tokens(prompt: int, wanted: int, engine: Engine) -> int:
    """Return the number of tokens that may be generated after ``prompt`` tokens, at most ``wanted``."""
    from bigmodel.errors import ServeError

    longest = engine.core.max_length
    if not 0 < prompt < longest:
        raise ServeError(f"the prompt has {prompt} tokens; 1 to {longest - 1} can be continued")
    return min(wanted, longest - prompt)


class _Events:
    """Carries events from the engine's thread to the one that prints."""

    def __init__(self) -> None:
        import queue

        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self.events.put(event)


def _run(engine: Engine, request: Request, sink: _Events) -> str:
    """Generate and print; return speed and time to first token as text."""
    import time

    from bigmodel.errors import ServeError
    from bigmodel.server.engine import Done, Failed

    begun = time.perf_counter()
    first = None
    engine.start()
    try:
        engine.submit(request)
        while True:
            event = sink.events.get()
            if isinstance(event, Done):
                break
            if isinstance(event, Failed):
                raise ServeError(f"{event.message}: {engine.failure}") from engine.failure
            first = first or time.perf_counter()
            sys.stdout.write(event.text)
            sys.stdout.flush()
    finally:
        engine.stop()
    ended = time.perf_counter()
    sys.stdout.write("\n")
    first = first or ended
    tokens = event.completion_tokens
    rate = (tokens - 1) / (ended - first) if tokens > 1 and ended > first else tokens / (ended - begun)
    return f"{tokens} tokens, {rate:.2f} tokens/s after the first, first token after {first - begun:.3f} s,"


def peaks() -> str:
    """Return the peak memory of every device that stores or computes part of the model, as text."""
    from bigmodel.devices import accelerators

    return "peak " + ", ".join(f"{device} {peak_text(device)}" for device in [*accelerators(), "cpu"])


def peak_text(device: str) -> str:
    from bigmodel.devices import format_size, max_memory_allocated
    from bigmodel.errors import DeviceError

    try:
        return format_size(max_memory_allocated(device))
    except DeviceError:  # it records none: mps, or a host with a poor /proc
        return "unknown"

"""`bigmodel plan`: the placement and memory of a model's parts, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .model_options import AsJson, Budgets, DType, HostKernels, Model, OffloadDType, Revision, Speculate
from .tables import print_tables

if TYPE_CHECKING:
    from bigmodel.plan import Plan


def plan(
    model: Model,
    max_memory: Budgets = None,
    dtype: DType = "auto",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences per batch. Default: 1; with --objective throughput the fastest number."),
    ] = None,
    context: Annotated[int | None, typer.Option(min=0, help="Final length of a sequence, in tokens.")] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=0, help="How many of these are generated; default: any number.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="An argument of the model's forward that memory is planned for, as pixel_values=1x3x224x224 or "
            "input_ids=1x128:int64; may be repeated.",
        ),
    ] = None,
    padded: Annotated[
        bool, typer.Option(help="Budgets hold for padded sequences too; --no-padded: none is ever padded.")
    ] = True,
    strict: Annotated[bool, typer.Option(help="Fail if the memory of any input of the model is unknown.")] = False,
    strategy: Annotated[
        str, typer.Option(help="How devices are filled without a search: auto, balanced, balanced_low_0 or sequential.")
    ] = "auto",
    objective: Annotated[
        str | None,
        typer.Option(
            help="Search for the plan of least time instead, and predict its seconds: latency (of a token), throughput "
            "(of the whole job) or fit (no search). The first use measures this machine (half a minute)."
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            help="With --objective, weights that do not fit the accelerators: stream, compute (on the CPU) or auto: "
            "the faster for each part. Default: stream."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plan's devices to this .svg or .html file.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option(help="Also explain the plan in sentences.")] = False,
    offload_dtype: OffloadDType = None,
    host_kernels: HostKernels = "exact",
    expert_reuse: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the experts chosen by a step that are cached as routers choose again, as dispatch_stats() "
            "of a mixture that has run has it. Default: 0.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens proposed for each sequence of a step, at most, as by a draft model: the plan says whether "
            "that is faster. Default: none; with --speculate 1.",
        ),
    ] = None,
    speculate: Speculate = None,
    prefill_chunk_size: Annotated[
        str,
        typer.Option(
            help="Tokens of each forward in which 'generate' runs a longer prompt; auto: the whole prompt, or as "
            "many as let accelerators run all layers; none: a prompt is one forward."
        ),
    ] = "auto",
    micro_batch_size: Annotated[
        str,
        typer.Option(
            help="Rows in which a forward of the batch is computed where all parts are resident on several "
            "accelerators, several such micro-batches at once; auto: the fastest by prediction; none: the whole batch."
        ),
    ] = "none",
    train: Annotated[
        str | None,
        typer.Option(
            help="Plan training with this optimizer: adamw, adam, sgd or adafactor. With --max-memory: the placement "
            "for one process; else the memory of each of --ranks."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 1,
    sharding: Annotated[str, typer.Option(help="How they shard the model: ddp or fsdp.")] = "ddp",
    checkpointing: Annotated[bool, typer.Option(help="Recompute the activations of blocks in backward.")] = False,
    nodes: Annotated[
        Path | None,
        typer.Option(
            help="Plan over several hosts, a stage of layers on each: a JSON file of their budgets and links. "
            "--objective: latency (of a step, the default) or throughput (the slowest stage is fastest)."
        ),
    ] = None,
) -> None:
    """Plan MODEL from its config and safetensors headers; no weight is read or downloaded."""
    from bigmodel.plan import make_plan, plan_training
    from bigmodel.profile import meta_model
    from bigmodel.profile.trace.inputs import parse_inputs
    from bigmodel.server.loading import LoadOptions, parse_max_memory, plan_with_head
    from bigmodel.sources.resolve import open_source

    if nodes is not None:
        given = {
            "--max-memory": max_memory is not None,
            "--strategy": strategy != "auto",
            "--input": bool(inputs),
            "--no-padded": not padded,
            "--strict": strict,
            "--plot": plot is not None,
            "--explain": explain,
            "--offload-dtype": offload_dtype is not None,
            "--host-kernels": host_kernels != "exact",
            "--expert-reuse": expert_reuse is not None,
            "--train": train is not None,
            "--prefill-chunk-size": prefill_chunk_size != "auto",
            "--micro-batch-size": micro_batch_size != "none",
        }
        _refuse_beside_nodes(given)
        shape = (batch_size or 1, context, None if dtype == "auto" else dtype, new_tokens)
        _show_nodes(model, nodes, shape, (objective or "latency", offload or "stream", revision), as_json)
        return
    if train is not None and (inputs or strict):
        raise typer.BadParameter("--input and --strict apply to inference only; remove them or --train")
    if train is None and (ranks > 1 or sharding != "ddp" or checkpointing):
        raise typer.BadParameter("--ranks, --sharding and --checkpointing apply to training only; add --train")
    if train is not None and prefill_chunk_size != "auto":
        raise typer.BadParameter("--prefill-chunk-size applies to generation only; remove it or --train")
    if train is not None and expert_reuse is not None:
        raise typer.BadParameter("--expert-reuse applies to inference only; remove it or --train")
    if train is not None and micro_batch_size != "none":
        raise typer.BadParameter("--micro-batch-size applies to inference only; remove it or --train")
    _check_search(objective, offload, strategy, train)
    budgets = parse_max_memory(max_memory)
    if train is not None and budgets is None:
        if plot is not None:
            raise typer.BadParameter("--plot draws a plan under budgets; give --max-memory")
        _show_memory(
            model, dtype, revision, train, as_json, (batch_size or 1, context), (ranks, sharding, checkpointing)
        )
        return
    if train is not None:
        if ranks > 1 or checkpointing:
            raise typer.BadParameter("--max-memory plans one process; remove it, or --ranks and --checkpointing")
        skeleton = meta_model(open_source(model, revision), dtype)
        _show(plan_training(skeleton, budgets, batch_size or 1, context, train), as_json, explain, plot)
        return
    head = None
    if speculate is not None:
        shapes = LoadOptions(max_memory=budgets, dtype=dtype, revision=revision, context_length=context)
        _, head = plan_with_head(model, {**shapes, "batch_size": batch_size or 1})
        draft_tokens = draft_tokens or 1
    found = make_plan(
        model,
        budgets,
        strategy,
        batch_size,
        context,
        dtype,
        new_tokens=new_tokens,
        offload_dtype=offload_dtype,
        host_kernels=host_kernels,
        expert_reuse=expert_reuse,
        objective=objective,
        offload=offload or "stream",
        sample_inputs=parse_inputs(inputs) if inputs else None,
        strict=strict,
        padded=padded,
        revision=revision,
        draft_tokens=draft_tokens or 0,
        draft=head,
        prefill_chunk_size=_size("--prefill-chunk-size", prefill_chunk_size, "tokens"),
        micro_batch_size=_size("--micro-batch-size", micro_batch_size, "rows"),
    )
    _show(found, as_json, explain, plot)


def _size(option: str, given: str, unit: str) -> int | str | None:
    """Return the value of an option of sizes as `plan` takes it: a number, "auto", or None for "none"."""
    if given in ("auto", "none"):
        return None if given == "none" else given
    if not given.isdecimal() or not int(given):
        raise typer.BadParameter(f"{option} is {given!r}; give a number of {unit}, auto or none")
    return int(given)


def _check_search(objective: str | None, offload: str | None, strategy: str, train: str | None) -> None:
    """Reject options that would be ignored."""
    if objective is None and offload is not None:
        raise typer.BadParameter("--offload applies to the search for the fastest plan only; add --objective")
    if objective is not None and strategy != "auto":
        raise typer.BadParameter("--strategy fills devices without a search; remove it or --objective")
    if objective is not None and train is not None:
        raise typer.BadParameter("--objective applies to generation only; remove it or --train")


def _refuse_beside_nodes(given: Mapping[str, bool]) -> None:
    """Reject options that do not apply to a plan over nodes."""
    ignored = [name for name, is_given in given.items() if is_given]
    if ignored:
        raise typer.BadParameter(f"{', '.join(ignored)}: not with --nodes, whose file has the budgets; remove one")


def _show_nodes(
    model: str,
    nodes: Path,
    shape: tuple[int, int | None, str | None, int | None],
    way: tuple[str, str, str | None],
    as_json: bool,
) -> None:
    """Print the plan over nodes. `shape`: arguments of `plan_nodes` from `batch_size` on; `way`: those after them."""
    from bigmodel.plan import plan_nodes, read_nodes

    found = plan_nodes(model, read_nodes(nodes), *shape, *way)
    if as_json:
        typer.echo(found.to_json())
    else:
        print_tables(found.to_table())


def _show(found: Plan, as_json: bool, explain: bool, plot: Path | None) -> None:
    if plot is not None:
        found.plot(plot)
    if as_json:
        typer.echo(found.to_json())
        return
    print_tables(found.to_table())
    if explain:
        typer.echo(found.explain())


def _show_memory(
    model: str,
    dtype: str,
    revision: str | None,
    optimizer: str,
    as_json: bool,
    shape: tuple[int, int | None],
    way: tuple[int, str, bool],
) -> None:
    """Print the memory of one rank. `shape`: batch and context; `way`: ranks, sharding and checkpointing."""
    import json
    from dataclasses import asdict

    from rich.table import Table

    from bigmodel.devices import format_size
    from bigmodel.profile import meta_model, training_memory
    from bigmodel.sources.resolve import open_source

    ranks, strategy, checkpointing = way
    found = asdict(
        training_memory(
            meta_model(open_source(model, revision), dtype),
            *shape,
            optimizer,
            checkpointing=checkpointing,
            ranks=ranks,
            strategy=strategy,
        )
    )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    drawn = Table("one rank's", "bytes")
    for name, nbytes in found.items():
        drawn.add_row("peak" if name == "total" else name, format_size(nbytes))
    print_tables(drawn)

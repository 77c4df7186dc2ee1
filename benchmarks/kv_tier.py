"""Does a step of generation whose keys and values lie on the host take no longer than its compute, or its bytes need?

A Llama generates at a context of which the accelerator's budget holds a quarter of the keys and values beside the
weights, so the plan has most layers' in RAM and fetches them ahead of use. A virtual link has a set bandwidth, a real
one its own for pinned memory. The bound is the larger of two times: of the same step with everything on the
accelerator, and of the bytes of streamed weights and fetched keys and values over the link. A third plan lacks three
quarters of the RAM that these take, too, so that older ones are on disk: its bound is also the time in which its bytes
on disk are read alone, as they lie there, by as many threads. The same as of the second plan is measured of a step of
the server's engine, whose keys and values are in pages. transformers' own offloaded cache needs CUDA's streams and does
not run on the virtual one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigmodel.limits import CHUNK_BYTES, STAGING_BYTES

from .harness import BenchmarkError, Column, Limit, Report, Table, Variant, elapsed, measure
from .harness.devices import first_device, is_virtual
from .harness.report import Cell
from .links import pinned_rate

if TYPE_CHECKING:
    import torch

    from bigmodel.plan import Plan
    from bigmodel.profile import Profile

MOST = 1.05
"""The most that a step may take of its bound."""

HELD = 0.25
"""Share of the keys and values that the accelerator's budget holds."""

ON_DEVICE, ON_HOST = "all on the accelerator", "keys and values as planned"
ON_DISK = "older keys and values on disk"
SERVED_ON_DEVICE, SERVED_ON_HOST = f"server, {ON_DEVICE}", f"server, {ON_HOST}"

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


@dataclass(frozen=True)
class Sizes:
    """Layers and width of the model, tokens of context, bytes per second of the link, steps behind each value, and the
    device."""

    layers: int
    width: int
    context: int
    rate: float
    steps: int
    device: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=None, help="steps behind each value")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure steps with all keys and values on the accelerator, and as planned, in the same rounds."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    device = first_device(options.device)
    if options.device == "cuda":
        rate = pinned_rate(64 * 2**20, device)
        sizes = Sizes(16, 64, 2048, rate, 1, device) if options.quick else Sizes(16, 2048, 32768, rate, 3, device)
    else:
        sizes = Sizes(16, 64, 2048, 8e7, 1, device) if options.quick else Sizes(12, 256, 8192, 2e8, 3, device)
        virtual.enable(1, bandwidth=sizes.rate)
    sizes = replace(sizes, steps=options.steps or sizes.steps)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        try:
            return compared(options, sizes, Path(folder))
        finally:
            if options.device == "virtual":
                virtual.disable()


def compared(options: argparse.Namespace, sizes: Sizes, folder: Path) -> Report:
    """Return the report of steps; `folder` is for keys and values on disk."""
    import torch

    from bigmodel.dispatch import dispatch_model

    profile = profile_of(sizes)
    found = planned(profile, sizes)
    deeper = planned(profile, sizes, on_disk=True)
    texts = {
        ON_DEVICE: Text(dispatch_model(make(sizes), {"": 0}), sizes),
        ON_HOST: Text(dispatch_model(make(sizes), found), sizes),
        ON_DISK: Text(dispatch_model(make(sizes), deeper, offload_dir=folder), sizes),
        SERVED_ON_DEVICE: ServedText(dispatch_model(make(sizes), {"": 0}), sizes),
        SERVED_ON_HOST: ServedText(dispatch_model(make(sizes), found), sizes),
    }
    one, other, from_disk, served, as_served = (text.logits() for text in texts.values())
    variants = [Variant(name, partial(text.seconds, sizes.steps)) for name, text in texts.items()]
    samples = measure(variants, options.rounds, seed=options.seed)
    reading = deeper.kv_on_disk / read_rate(folder, deeper.kv_on_disk, deeper.readers)
    fetched, streamed = bytes_of(found, profile)
    link = (fetched + streamed) / sizes.rate
    link_beside_disk = sum(bytes_of(deeper, profile)) / sizes.rate
    steps = {name: samples.summary(name) for name in texts}
    ratio = steps[ON_HOST].median / max(link, steps[ON_DEVICE].median)
    of_server = steps[SERVED_ON_HOST].median / max(link, steps[SERVED_ON_DEVICE].median)
    rows: list[list[Cell]] = [
        [name, step.median, step.first_quartile, step.third_quartile] for name, step in steps.items()
    ]
    of_disk = steps[ON_DISK].median / max(link_beside_disk, reading, steps[ON_DEVICE].median)
    rows.append(["bytes over the link", link, None, None])
    rows.append(["bytes over the link, older ones on disk", link_beside_disk, None, None])
    rows.append(["bytes on disk, read alone", reading, None, None])
    return Report(
        "kv_tier",
        options.device,
        settings={
            **vars(sizes),
            "threads": torch.get_num_threads(),
            "fetched": fetched,
            "streamed": streamed,
            "on_disk": deeper.kv_on_disk,
        },
        tables=[
            Table(
                f"{sizes.context:,} tokens of context, keys and values of {len(found.kv_on_host)} of {sizes.layers} "
                "layers in RAM",
                [Column("step"), *(Column(name, "seconds") for name in ("median", "q1", "q3"))],
                rows,
            )
        ],
        limits=[
            Limit("step over the larger of compute and bytes over the link", ratio, "<=", MOST),
            Limit("step with older ones on disk over the largest of three", of_disk, "<=", MOST),
            Limit("step of the server over the larger of both", of_server, "<=", MOST),
            Limit("logits that differ from those of the accelerator's own cache", float((one != other).sum()), "==", 0),
            Limit("logits that differ with older ones on disk", float((one != from_disk).sum()), "==", 0),
            Limit("logits of the server that differ", float((served != as_served).sum()), "==", 0),
        ],
        samples={"steps": samples},
    )


def make(sizes: Sizes) -> Any:
    """Return a Llama of these sizes with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=2 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.width // 32,
        num_key_value_heads=sizes.width // 64,
        vocab_size=256,
        max_position_embeddings=2 * sizes.context,
    )
    with torch.device("cpu" if is_virtual(sizes.device) else sizes.device):  # the host is slow at random numbers
        model: Any = LlamaForCausalLM(config)
    return model.to("cpu").eval()


def profile_of(sizes: Sizes) -> Profile:
    """Return the profile of a short prompt and a long text after it."""
    import torch

    from bigmodel.profile import profile_model

    return profile_model(
        make(sizes),
        context_length=sizes.context,
        new_tokens=sizes.context - 16,
        device_type=torch.device(sizes.device).type,
        padded=False,
    )


def bytes_of(found: Plan, profile: Profile) -> tuple[int, int]:
    """Return the bytes of keys and values that cross the link in a step, and those of weights."""
    there = set(found.kv_on_host)
    fetched = sum(profile.kv_cache[at] for at, unit in enumerate(profile.units) if unit.name in there)
    return fetched, sum(part.bytes for part in found.streamed)


def read_rate(folder: Path, nbytes: int, readers: int) -> float:
    """Return the bytes per second at which `readers` threads read a file of `nbytes` in chunks: the best of three."""
    buffers = [bytearray(CHUNK_BYTES) for _ in range(readers)]
    with tempfile.TemporaryFile(dir=folder) as file:
        for begin in range(0, nbytes, CHUNK_BYTES):
            file.write(os.urandom(min(CHUNK_BYTES, nbytes - begin)))
        file.flush()

        def read(number: int) -> None:
            for begin in range(number * CHUNK_BYTES, nbytes, readers * CHUNK_BYTES):
                os.preadv(file.fileno(), [buffers[number]], begin)

        def whole() -> None:
            with ThreadPoolExecutor(readers) as threads:
                list(threads.map(read, range(readers)))

        return nbytes / min(elapsed(whole, "cpu") for _ in range(3))


def planned(profile: Profile, sizes: Sizes, on_disk: bool = False) -> Plan:
    """Return the plan under a budget that lacks three quarters of the bytes of keys and values; with `on_disk`, under
    one of the RAM that lacks as many of those that would lie there.

    Raises:
        BenchmarkError: it has no keys and values on the host, or on disk.
    """
    from bigmodel.plan import plan

    whole = plan(profile, {0: 2**40, "cpu": 2**40}).devices[0].total
    budget = whole - int((1 - HELD) * sum(profile.kv_cache))
    found = plan(profile, {0: budget, "cpu": 2**40})
    if on_disk:
        host = found.devices["cpu"]
        staged = min(max(profile.kv_cache), STAGING_BYTES)
        found = plan(profile, {0: budget, "cpu": int(host.total - (1 - HELD) * host.kv_cache + staged)})
        if not found.kv_on_disk:
            raise BenchmarkError("the plan has all keys and values in RAM")
    if not found.kv_on_host:
        raise BenchmarkError("the plan has all keys and values on the accelerator")
    return found


class Text:
    """A model in the middle of a long text.

    Args:
        model: The model, dispatched.
        sizes: Their context.
    """

    def __init__(self, model: Any, sizes: Sizes) -> None:
        import torch
        from transformers import DynamicCache

        self._model, self._device = model, sizes.device
        self._past: Any = DynamicCache()
        self._tokens = torch.arange(16)[None].to(self._device)
        self._forward(self._tokens)
        generator = torch.Generator().manual_seed(0)
        layers: list[Any] = self._past.layers
        for layer in layers:  # as if the text so far had been computed
            shape = (1, sizes.width // 64, sizes.context - 64, 32)
            keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
            layer.keys, layer.values = keys.to(layer.device), values.to(layer.device)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            found: torch.Tensor = self._model(tokens, past_key_values=self._past).logits
        return found

    def logits(self) -> torch.Tensor:
        """Return the logits of one further token, on the host."""
        return self._step().cpu()

    def _step(self) -> torch.Tensor:
        return self._forward(self._tokens[:, :1])

    def seconds(self, steps: int) -> float:
        """Return the mean seconds of `steps` steps after an unmeasured one."""
        self.logits()
        return elapsed(lambda: [self._step() for _ in range(steps)], self._device) / steps


class ServedText(Text):
    """A model in the middle of a long text, as the server's engine computes it."""

    def __init__(self, model: Any, sizes: Sizes) -> None:
        import torch

        from bigmodel.server.engine.build import kv_maker
        from bigmodel.server.engine.compute.runner import PackedRunner
        from bigmodel.server.engine.kv.arena import PagedKV

        self._runner, self._device = PackedRunner(model, row_multiple=1), sizes.device
        kv = kv_maker(self._runner, sizes.context)()
        assert isinstance(kv, PagedKV)
        kv.reserve(sizes.context)
        self._kv, self._at = kv, 1
        self._step()
        self._at = sizes.context - 64
        generator = torch.Generator().manual_seed(0)
        for layer in kv.layers():
            shape = (self._at, sizes.width // 64, 32)
            keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
            device = kv.arena.layer(layer)[0].device
            with torch.inference_mode():
                kv.arena.write(layer, kv.rows(0, self._at).to(device), keys.to(device), values.to(device))

    def _step(self) -> torch.Tensor:
        from bigmodel.server.engine.compute.runner import PackedTokens

        found = self._runner.compute([PackedTokens(self._kv, [1], self._at, 1, 1)])[0]
        assert found is not None
        return found

"""Models in the middle of a long text, for benchmarks of keys and values: of `generate`, and of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .harness import elapsed
from .harness.devices import is_virtual
from .peers import cuda_streams

if TYPE_CHECKING:
    import torch


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


class Text:
    """A model in the middle of a long text.

    Args:
        model: The model, dispatched.
        sizes: Their context.
    """

    def __init__(self, model: Any, sizes: Sizes) -> None:
        import torch

        self._model, self._device = model, sizes.device
        self._past = self._cache()
        self._tokens = torch.arange(16)[None].to(self._device)
        self._forward(self._tokens)
        generator = torch.Generator().manual_seed(0)
        layers: list[Any] = self._past.layers
        for layer in layers:  # as if the text so far had been computed
            shape = (1, sizes.width // 64, sizes.context - 64, 32)
            keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
            where = layer.keys.device
            layer.keys, layer.values = keys.to(where), values.to(where)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

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


class OffloadedText(Text):
    """A model in the middle of a long text, with transformers' offloaded cache."""

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config, offloading=True)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with cuda_streams():
            return super()._forward(tokens)


class ServedText(Text):
    """A model in the middle of a long text, as the server's engine computes it.

    Args:
        model: The model, dispatched.
        sizes: Their context.
        in_ram: Positions whose keys and values RAM holds, of those on the host; None: all.
    """

    def __init__(self, model: Any, sizes: Sizes, in_ram: int | None = None) -> None:
        import torch

        from bigmodel.server.engine.build import kv_maker
        from bigmodel.server.engine.compute.runner import PackedRunner
        from bigmodel.server.engine.kv.arena import PagedKV

        self._runner, self._device = PackedRunner(model, row_multiple=1), sizes.device
        kv = kv_maker(self._runner, sizes.context, in_ram)()
        assert isinstance(kv, PagedKV)
        kv.reserve(sizes.context)
        self._kv, self._at, self._end = kv, 1, sizes.context
        self._step()
        self._begin = self._at = sizes.context - 64
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
        self._at = self._at + 1 if self._at + 1 < self._end else self._begin
        assert found is not None
        return found

    @property
    def on_disk(self) -> int:
        """Bytes of keys and values that each step reads from the disk."""
        pages = self._kv.arena.host
        assert pages is not None
        assert pages.tiers is not None
        there = len(pages.tiers.table.written - pages.tiers.table.both)
        size = sum(each.nbytes for frames in pages.tiers.frames.values() for each in frames)
        return there * size // pages.tiers.table.frames

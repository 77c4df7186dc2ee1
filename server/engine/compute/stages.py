"""Packed steps of a model over several nodes: each stage keeps the keys and values of its own layers.

The first stage schedules, packs and samples. What other stages need beside hidden states are the spans of a step: which
sequence, which of its positions, and where its prompt ends. They attend in the calls that follow from these, as one
process would, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from bigmodel.nodes.caches import NumberedCaches
from bigmodel.server.engine.compute.attention import RaggedCache, Span, ragged_step
from bigmodel.server.engine.compute.host_linear import HostLinear, OneDnnLinear
from bigmodel.server.engine.kv.buffers import SequenceKV


class PackedCaches(NumberedCaches):
    """Keys and values of sequences in packed steps, by number; and transformers' caches, as an engine is chosen.

    Args:
        new_kv: Makes the keys and values of a sequence on a stage that follows.
        host_linear: Library of this stage's float32 products on the host.
    """

    def __init__(self, new_kv: Callable[[], SequenceKV] = SequenceKV, host_linear: HostLinear = "torch") -> None:
        super().__init__()
        self._new_kv = new_kv
        self._onednn = host_linear == "onednn"

    def tell(self, cache: Any) -> dict[str, Any]:
        """See :meth:`NumberedCaches.tell`."""
        if not isinstance(cache, RaggedCache):
            return super().tell(cache)
        spans = [
            [self._number(span.kv)[0], span.kv.capacity, span.row, span.start, span.end, span.prompt_length]
            for span in cache.spans
        ]
        return {"spans": spans, "dropped": self._gone()}

    @contextmanager
    def follow(self, values: Mapping[str, Any], model: nn.Module) -> Iterator[dict[str, Any]]:
        """See :meth:`NumberedCaches.follow`."""
        if "spans" not in values:
            with super().follow(values, model) as arguments:
                yield arguments
            return
        self._drop(values)
        spans: list[Span] = []
        for number, capacity, *places in values["spans"]:
            kv = self.kept.get(number)
            if kv is None:
                kv = self.kept[number] = self._new_kv()
            kv.reserve(capacity)
            spans.append(Span(kv, *places))
        cache = RaggedCache(spans)
        with ragged_step(cache), OneDnnLinear() if self._onednn else nullcontext():
            yield {"use_cache": True, "past_key_values": cache}

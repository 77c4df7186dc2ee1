"""What tests ask a model's source."""

from __future__ import annotations

from bigmodel.sources.local import ModelSource


def weight_bytes(source: ModelSource) -> int:
    """Bytes of all tensors of the checkpoint, as they lie in its files."""
    headers = source.headers()
    return sum(headers[file][name].nbytes for name, file in source.weight_map().items())

"""Which weights of a placed model are computed with on the host where they lie on disk, and so are read ahead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from ..checkpoint import mapped_region
from ..profile import expert_names
from .dispatched import Dispatched
from .mapped_block import MappedBlock, Owner
from .placement import Placed
from .readahead import ReadAhead
from .source_file import SourceFiles


def attach_read_ahead(
    pieces: Iterable[tuple[str, list[str], bool]],
    modules: Mapping[str, nn.Module],
    placed: Mapping[str, Placed],
    moved: Collection[str],
    result: Dispatched,
    budget: int | None,
) -> None:
    """Have weights that a module computes with on the host, out of a mapped file, brought in ahead of its forward.

    Args:
        pieces: Module names in the order of the model, each with the names of its tensors.
        modules: The model's modules by name.
        placed: Its tensors by name.
        moved: Names of tensors that are streamed to another place to be computed with.
        result: Gets the attachments.
        budget: Bytes that the process's resident set may take; None for no limit but the memory's.
    """
    files = SourceFiles()
    blocks: dict[str, MappedBlock] = {}
    for name, names, _ in pieces:
        owners = [_owner(modules, placed[n]) for n in names if n not in moved and _lies_on_disk(placed[n])]
        if owners:
            blocks[name] = MappedBlock(name, owners, files)
    if not blocks:
        return
    reader = ReadAhead(list(blocks.values()), budget)
    result.readers.append(reader)
    for name, block in blocks.items():
        result.forward_of(name, modules[name]).ahead = (reader, block)


def _lies_on_disk(placed: Placed) -> bool:
    return placed.offloaded and mapped_region(placed.registry[placed.key]) is not None


def _owner(modules: Mapping[str, nn.Module], placed: Placed) -> Owner:
    owner = modules[placed.name.rpartition(".")[0]]
    sparse = isinstance(owner, nn.Embedding) or placed.key in expert_names(owner)
    return Owner(placed.registry, placed.key, placed.is_buffer, sparse)

"""Files whose maps are a model's weights: one that was cut short is noticed before its pages are touched."""

from __future__ import annotations

import torch

from bigmodel.checkpoint.mapping import mapped_file
from bigmodel.dispatch.transfer.files import SourceFile, SourceFiles
from bigmodel.errors import CheckpointFormatError


class WeightFiles:
    """The files that are mapped as weights of some models, also as weights that count as memory.

    Args:
        models: The models; None stands for one that there is not.
    """

    def __init__(self, *models: torch.nn.Module | None) -> None:
        opened = SourceFiles()
        self._files: dict[SourceFile, int] = {}
        for model in models:
            for tensor in () if model is None else (*model.parameters(), *model.buffers()):
                region = mapped_file(tensor)
                file = None if region is None else opened.get(region)
                if region is not None and file is not None:  # the map of a file that is gone shows its old bytes
                    self._files[file] = region.nbytes

    def check(self) -> None:
        """Raise CheckpointFormatError if one is shorter than its map: reading it there would end the process (SIGBUS).

        Takes about a microsecond for each file.
        """
        for file, nbytes in self._files.items():
            size = file.size()
            if size < nbytes:
                raise CheckpointFormatError(
                    f"{file.path}: is {size} bytes long and had {nbytes} when it was mapped: it was cut short while in "
                    "use; copy or download it again"
                )

"""Filters for import-time log messages of libraries, which users of a command cannot act on."""

from __future__ import annotations

import logging
import os

_NOISE = {
    "torchao": "Failed to load ",  # kernels built for other machines
    "torch.utils._pytree": "register_constant() on Enum",  # torchao registering its own types
}
"""Logger -> phrase in the messages that are dropped."""


class DropPhrase(logging.Filter):
    """Drops log messages that contain `phrase`."""

    def __init__(self, phrase: str) -> None:
        super().__init__()
        self.phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self.phrase not in record.getMessage()


def filter_library_logs() -> None:
    """Install the filters. Must run before torch or transformers is imported."""
    # transformers logs details of loading; commands report the relevant ones themselves.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name, phrase in _NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, DropPhrase) for each in logger.filters):
            logger.addFilter(DropPhrase(phrase))

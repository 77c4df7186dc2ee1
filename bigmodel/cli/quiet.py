"""What libraries say about themselves as they are imported, and what no user of a command can do anything about."""

from __future__ import annotations

import logging
import os

_NOISE = {
    "torchao": "Failed to load ",  # kernels that it brings for other machines
    "torch.utils._pytree": "register_constant() on Enum",  # how torchao registers its own types with torch
}
"""Logger -> what its messages contain that are left out; everything else that it says is shown."""


class Without(logging.Filter):
    """Lets through the messages that do not contain `phrase`."""

    def __init__(self, phrase: str) -> None:
        super().__init__()
        self.phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self.phrase not in record.getMessage()


def quieten() -> None:
    """Leave that out from now on. Call it before torch or transformers is imported."""
    # transformers reports on loading through its logger; here only what concerns the user is said.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name, phrase in _NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, Without) for each in logger.filters):
            logger.addFilter(Without(phrase))

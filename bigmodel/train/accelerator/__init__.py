"""The Accelerator."""

from bigmodel.train.accelerator.core import Accelerator

__all__ = ["Accelerator"]

"""Imports torchvision from a wheel for another build of PyTorch, whose compiled operators do not load."""

from __future__ import annotations

import sys
from importlib import import_module

import torch

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def import_torchvision() -> None:
    """Import torchvision if it is installed; declare the two operators without which no import works."""
    try:
        import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        for operator in ("nms", "qnms"):
            _DECLARED.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""Plan: numbers in, plan out. No tensor is touched here."""

from __future__ import annotations

from .balance import balanced_caps, get_balanced_memory
from .device_map import check_device_map, clean_device_map, owner_of
from .infer import infer_auto_device_map
from .make import STRATEGIES, make_plan
from .plan_type import DevicePlan, Part, Plan, Prediction
from .planner import OBJECTIVES, plan
from .searcher import OFFLOADS
from .training import plan_training
from .window import AHEAD_BYTES, STAGING_BYTES, read_ahead_window, staging

__all__ = [
    "AHEAD_BYTES",
    "OBJECTIVES",
    "OFFLOADS",
    "STAGING_BYTES",
    "STRATEGIES",
    "DevicePlan",
    "Part",
    "Plan",
    "Prediction",
    "balanced_caps",
    "check_device_map",
    "clean_device_map",
    "get_balanced_memory",
    "infer_auto_device_map",
    "make_plan",
    "owner_of",
    "plan",
    "plan_training",
    "read_ahead_window",
    "staging",
]

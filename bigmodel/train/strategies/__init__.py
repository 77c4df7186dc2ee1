"""Strategies: how the processes of a run share one model."""

from bigmodel.train.strategies.base import Strategy, StrategySettings
from bigmodel.train.strategies.selection import make_strategy

__all__ = ["Strategy", "StrategySettings", "make_strategy"]

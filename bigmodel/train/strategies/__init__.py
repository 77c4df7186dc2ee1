"""Strategies: how the processes of a run share one model."""

from bigmodel.train.strategies.base import Strategy
from bigmodel.train.strategies.selection import make_strategy
from bigmodel.train.strategies.settings import StrategySettings

__all__ = ["Strategy", "StrategySettings", "make_strategy"]

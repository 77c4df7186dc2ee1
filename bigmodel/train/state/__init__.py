"""State: which process this is, how it trains, and where its training loop stands."""

from bigmodel.train.state.accelerator_state import AcceleratorState
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.state.kind import Plugins
from bigmodel.train.state.partial import PartialState
from bigmodel.train.state.ranks import RankOperations

__all__ = ["AcceleratorState", "GradientState", "PartialState", "Plugins", "RankOperations"]

"""The names of ``accelerate.state``: what a process knows of its run."""

from bigmodel.train import AcceleratorState as AcceleratorState
from bigmodel.train import DistributedType as DistributedType
from bigmodel.train import GradientState as GradientState
from bigmodel.train import PartialState as PartialState

"""The names of ``accelerate.optimizer``: the wrapped optimizer."""

from bigmodel.train import AcceleratedOptimizer as AcceleratedOptimizer

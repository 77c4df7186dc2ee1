"""The names of ``accelerate.scheduler``: the wrapped learning rate scheduler."""

from bigmodel.train import AcceleratedScheduler as AcceleratedScheduler

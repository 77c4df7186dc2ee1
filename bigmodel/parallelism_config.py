"""The names of ``accelerate.parallelism_config``: the sizes of the device mesh."""

from bigmodel.train import ParallelismConfig as ParallelismConfig

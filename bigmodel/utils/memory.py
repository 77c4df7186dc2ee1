"""The names of ``accelerate.utils.memory``: freeing memory, and batch sizes that fit."""

from bigmodel.train.memory import clear_device_cache as clear_device_cache
from bigmodel.train.memory import find_executable_batch_size as find_executable_batch_size
from bigmodel.train.memory import release_memory as release_memory
from bigmodel.train.memory import should_reduce_batch_size as should_reduce_batch_size

"""The names of ``accelerate.logging``: loggers that know their rank."""

from bigmodel.train.logging import MultiProcessAdapter as MultiProcessAdapter
from bigmodel.train.logging import get_logger as get_logger

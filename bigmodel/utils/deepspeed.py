"""The names of ``accelerate.utils.deepspeed``: DeepSpeed's configuration and placeholders."""

from bigmodel.compat.classes import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from bigmodel.train import DummyOptim as DummyOptim
from bigmodel.train import DummyScheduler as DummyScheduler
from bigmodel.train.strategies.deepspeed.config import DeepSpeedConfig, EngineScheduler

HfDeepSpeedConfig = DeepSpeedConfig
DeepSpeedSchedulerWrapper = EngineScheduler

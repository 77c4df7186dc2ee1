"""The names of ``accelerate.utils.deepspeed``: DeepSpeed's configuration and placeholders."""

from bigmodel.compat.classes import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from bigmodel.compat.deepspeed import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from bigmodel.compat.deepspeed import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from bigmodel.compat.deepspeed import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from bigmodel.train import DummyOptim as DummyOptim
from bigmodel.train import DummyScheduler as DummyScheduler
from bigmodel.train.strategies.deepspeed.config import DeepSpeedConfig, EngineScheduler

HfDeepSpeedConfig = DeepSpeedConfig
DeepSpeedSchedulerWrapper = EngineScheduler

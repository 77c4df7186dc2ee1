"""The names of ``accelerate.utils.deepspeed``: DeepSpeed's configuration and placeholders.

transformers imports this module, for the configuration, whenever DeepSpeed is installed: the rest is imported when it
is used.
"""

from typing import TYPE_CHECKING

from bigmodel.lazy_names import names_used_later
from bigmodel.train.strategies.deepspeed.config import DeepSpeedConfig, EngineScheduler

if TYPE_CHECKING:
    from bigmodel.compat.classes import get_active_deepspeed_plugin as get_active_deepspeed_plugin
    from bigmodel.compat.deepspeed import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
    from bigmodel.compat.deepspeed import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
    from bigmodel.compat.deepspeed import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
    from bigmodel.train import DummyOptim as DummyOptim
    from bigmodel.train import DummyScheduler as DummyScheduler

HfDeepSpeedConfig = DeepSpeedConfig
DeepSpeedSchedulerWrapper = EngineScheduler

__getattr__, __dir__ = names_used_later(
    __name__,
    {
        "get_active_deepspeed_plugin": "bigmodel.compat.classes",
        "DeepSpeedEngineWrapper": "bigmodel.compat.deepspeed",
        "DeepSpeedOptimizerWrapper": "bigmodel.compat.deepspeed",
        "map_pytorch_optim_to_deepspeed": "bigmodel.compat.deepspeed",
        "DummyOptim": "bigmodel.train",
        "DummyScheduler": "bigmodel.train",
    },
)

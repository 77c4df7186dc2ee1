"""The names of ``accelerate.big_modeling``: dispatching a model whose modules show hooks (`bigmodel.compat`).

Libraries import this module long before they call it: planning and loading are imported with their first use.
"""

from typing import TYPE_CHECKING

from bigmodel.compat.big_modeling import cpu_offload as cpu_offload
from bigmodel.compat.big_modeling import disk_offload as disk_offload
from bigmodel.compat.big_modeling import dispatch_model as dispatch_model
from bigmodel.compat.big_modeling import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from bigmodel.compat.big_modeling import refuse_recurrent_layers
from bigmodel.compat.hooks.attach import attach_align_device_hook as attach_align_device_hook
from bigmodel.compat.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from bigmodel.compat.hooks.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from bigmodel.compat.hooks.model_hook import add_hook_to_module as add_hook_to_module
from bigmodel.compat.hooks.model_hook import remove_hook_from_submodules as remove_hook_from_submodules
from bigmodel.compat.hooks.whole_model import CpuOffload as CpuOffload
from bigmodel.compat.hooks.whole_model import UserCpuOffloadHook as UserCpuOffloadHook
from bigmodel.compat.hooks.whole_model import cpu_offload_with_hook as cpu_offload_with_hook
from bigmodel.compat.modeling import check_device_map as check_device_map
from bigmodel.devices.empty import init_empty_weights as init_empty_weights
from bigmodel.devices.empty import init_on_device as init_on_device
from bigmodel.lazy_names import names_used_later

_refuse_recurrent_layers_under_sequence_parallelism = refuse_recurrent_layers

if TYPE_CHECKING:
    from bigmodel.checkpoint import load_checkpoint_in_model as load_checkpoint_in_model
    from bigmodel.plan import get_balanced_memory as get_balanced_memory
    from bigmodel.plan import infer_auto_device_map as infer_auto_device_map

__getattr__, __dir__ = names_used_later(
    __name__,
    {
        "get_balanced_memory": "bigmodel.plan",
        "infer_auto_device_map": "bigmodel.plan",
        "load_checkpoint_in_model": "bigmodel.checkpoint",
    },
)

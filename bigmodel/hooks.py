"""The names of ``accelerate.hooks``: objects around the forward of a module."""

from bigmodel.compat.hooks.align import AlignDevicesHook as AlignDevicesHook
from bigmodel.compat.hooks.attach import attach_align_device_hook as attach_align_device_hook
from bigmodel.compat.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from bigmodel.compat.hooks.attach import attach_execution_device_hook as attach_execution_device_hook
from bigmodel.compat.hooks.casting import LayerwiseCastingHook as LayerwiseCastingHook
from bigmodel.compat.hooks.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from bigmodel.compat.hooks.dispatched import DispatchedHook as DispatchedHook
from bigmodel.compat.hooks.model_hook import ModelHook as ModelHook
from bigmodel.compat.hooks.model_hook import SequentialHook as SequentialHook
from bigmodel.compat.hooks.model_hook import add_hook_to_module as add_hook_to_module
from bigmodel.compat.hooks.model_hook import remove_hook_from_module as remove_hook_from_module
from bigmodel.compat.hooks.model_hook import remove_hook_from_submodules as remove_hook_from_submodules
from bigmodel.compat.hooks.whole_model import CpuOffload as CpuOffload
from bigmodel.compat.hooks.whole_model import UserCpuOffloadHook as UserCpuOffloadHook

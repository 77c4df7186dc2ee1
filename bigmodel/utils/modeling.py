"""The names of ``accelerate.utils.modeling``: sizes, device maps and loading.

Libraries import this module long before they call it: planning and loading are imported with their first use.
"""

from typing import TYPE_CHECKING

from bigmodel.compat.fallback import fallback_allocate as fallback_allocate
from bigmodel.compat.modeling import align_module_device as align_module_device
from bigmodel.compat.modeling import check_device_map as check_device_map
from bigmodel.compat.modeling import check_device_same as check_device_same
from bigmodel.compat.modeling import check_tied_parameters_in_config as check_tied_parameters_in_config
from bigmodel.compat.modeling import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from bigmodel.compat.modeling import dtype_byte_size as dtype_byte_size
from bigmodel.compat.modeling import get_grad_scaler as get_grad_scaler
from bigmodel.compat.modeling import get_max_memory as get_max_memory
from bigmodel.compat.modeling import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from bigmodel.compat.modeling import get_module_leaves as get_module_leaves
from bigmodel.compat.modeling import get_module_size_with_ties as get_module_size_with_ties
from bigmodel.compat.modeling import get_state_dict_from_offload as get_state_dict_from_offload
from bigmodel.compat.modeling import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from bigmodel.compat.modeling import has_offloaded_params as has_offloaded_params
from bigmodel.compat.offload_files import load_offloaded_weights as load_offloaded_weights
from bigmodel.lazy_names import names_used_later
from bigmodel.utils.models import get_non_persistent_buffers as get_non_persistent_buffers
from bigmodel.utils.models import id_tensor_storage as id_tensor_storage
from bigmodel.utils.models import is_peft_model as is_peft_model
from bigmodel.utils.models import named_module_tensors as named_module_tensors
from bigmodel.utils.models import set_module_tensor_to_device as set_module_tensor_to_device
from bigmodel.utils.structures import convert_file_size_to_int as convert_file_size_to_int

if TYPE_CHECKING:
    from bigmodel.checkpoint import load_checkpoint_in_model as load_checkpoint_in_model
    from bigmodel.checkpoint import load_state_dict as load_state_dict
    from bigmodel.plan import clean_device_map as clean_device_map
    from bigmodel.plan import get_balanced_memory as get_balanced_memory
    from bigmodel.plan import infer_auto_device_map as infer_auto_device_map
    from bigmodel.profile import calculate_maximum_sizes as calculate_maximum_sizes
    from bigmodel.profile import compute_module_sizes as compute_module_sizes
    from bigmodel.profile import compute_module_total_buffer_size as compute_module_total_buffer_size
    from bigmodel.profile import find_tied_parameters as find_tied_parameters
    from bigmodel.profile import get_max_layer_size as get_max_layer_size
    from bigmodel.profile import retie_parameters as retie_parameters
    from bigmodel.utils.files import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME

__getattr__, __dir__ = names_used_later(
    __name__,
    {
        "load_checkpoint_in_model": "bigmodel.checkpoint",
        "load_state_dict": "bigmodel.checkpoint",
        "clean_device_map": "bigmodel.plan",
        "get_balanced_memory": "bigmodel.plan",
        "infer_auto_device_map": "bigmodel.plan",
        "calculate_maximum_sizes": "bigmodel.profile",
        "compute_module_sizes": "bigmodel.profile",
        "compute_module_total_buffer_size": "bigmodel.profile",
        "find_tied_parameters": "bigmodel.profile",
        "get_max_layer_size": "bigmodel.profile",
        "retie_parameters": "bigmodel.profile",
        "WEIGHTS_INDEX_NAME": "bigmodel.utils.files",
    },
)

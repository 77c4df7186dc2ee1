"""The names of ``accelerate.utils.offload``: folders of offloaded weights."""

from bigmodel.compat.offload_files import OffloadedWeightsLoader as OffloadedWeightsLoader
from bigmodel.compat.offload_files import PrefixedDataset as PrefixedDataset
from bigmodel.compat.offload_files import extract_submodules_state_dict as extract_submodules_state_dict
from bigmodel.compat.offload_files import load_offloaded_weight as load_offloaded_weight
from bigmodel.compat.offload_files import offload_state_dict as offload_state_dict
from bigmodel.compat.offload_files import offload_weight as offload_weight
from bigmodel.compat.offload_files import save_offload_index as save_offload_index

"""The names of ``accelerate.utils.other``: wrappers of models, files and small helpers."""

from bigmodel.compat.classes import check_os_kernel as check_os_kernel
from bigmodel.compat.classes import get_free_port as get_free_port
from bigmodel.compat.classes import get_model_tp_size as get_model_tp_size
from bigmodel.compat.regions import compile_regions_deepspeed as compile_regions_deepspeed
from bigmodel.compat.regions import compile_regions_fsdp2 as compile_regions_fsdp2
from bigmodel.compat.regions import get_module_children_bottom_up as get_module_children_bottom_up
from bigmodel.compat.regions import has_repeated_blocks as has_repeated_blocks
from bigmodel.compat.regions import is_repeated_blocks as is_repeated_blocks
from bigmodel.launch.config_file import write_basic_config as write_basic_config
from bigmodel.train.wrappers import compile_regions as compile_regions
from bigmodel.utils.environment import is_port_in_use as is_port_in_use
from bigmodel.utils.files import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from bigmodel.utils.files import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from bigmodel.utils.files import load as load
from bigmodel.utils.files import np_core as np_core
from bigmodel.utils.files import save as save
from bigmodel.utils.models import extract_model_from_parallel as extract_model_from_parallel
from bigmodel.utils.models import has_compiled_regions as has_compiled_regions
from bigmodel.utils.models import is_compiled_module as is_compiled_module
from bigmodel.utils.models import model_has_dtensor as model_has_dtensor
from bigmodel.utils.models import wait_for_everyone as wait_for_everyone
from bigmodel.utils.structures import convert_bytes as convert_bytes
from bigmodel.utils.structures import get_pretty_name as get_pretty_name
from bigmodel.utils.structures import merge_dicts as merge_dicts
from bigmodel.utils.structures import recursive_getattr as recursive_getattr

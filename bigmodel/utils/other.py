"""The names of ``accelerate.utils.other``: wrappers of models, files and small helpers."""

from bigmodel.launch.config_file import write_basic_config as write_basic_config
from bigmodel.train.wrappers import compile_regions as compile_regions
from bigmodel.utils.environment import is_port_in_use as is_port_in_use
from bigmodel.utils.files import load as load
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

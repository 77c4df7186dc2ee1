"""The names of ``accelerate.utils.ao``: 8-bit training with torchao."""

from bigmodel.compat.float8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from bigmodel.compat.float8 import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from bigmodel.compat.float8 import filter_linear_layers as filter_linear_layers
from bigmodel.compat.float8 import find_first_last_linear_layers as find_first_last_linear_layers
from bigmodel.compat.float8 import has_ao_layers as has_ao_layers

"""The names of ``accelerate.utils.fsdp_utils``: checkpoints of sharded models."""

from bigmodel.compat.fsdp import get_parameters_from_modules as get_parameters_from_modules
from bigmodel.compat.fsdp import load_fsdp_model as load_fsdp_model
from bigmodel.compat.fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from bigmodel.compat.fsdp import save_fsdp_model as save_fsdp_model
from bigmodel.compat.fsdp import save_fsdp_optimizer as save_fsdp_optimizer
from bigmodel.train import merge_fsdp_weights as merge_fsdp_weights

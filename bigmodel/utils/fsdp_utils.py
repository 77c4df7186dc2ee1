"""The names of ``accelerate.utils.fsdp_utils``: checkpoints of sharded models."""

from bigmodel.compat.fsdp import get_parameters_from_modules as get_parameters_from_modules
from bigmodel.compat.fsdp import load_fsdp_model as load_fsdp_model
from bigmodel.compat.fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from bigmodel.compat.fsdp import save_fsdp_model as save_fsdp_model
from bigmodel.compat.fsdp import save_fsdp_optimizer as save_fsdp_optimizer
from bigmodel.compat.fsdp2 import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from bigmodel.compat.fsdp2 import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from bigmodel.compat.fsdp2 import ensure_weights_retied as ensure_weights_retied
from bigmodel.compat.fsdp2 import fsdp2_apply_ac as fsdp2_apply_ac
from bigmodel.compat.fsdp2 import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from bigmodel.compat.fsdp2 import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from bigmodel.compat.fsdp2 import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from bigmodel.compat.fsdp2 import fsdp2_prepare_model as fsdp2_prepare_model
from bigmodel.compat.fsdp2 import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from bigmodel.compat.fsdp2 import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from bigmodel.train import merge_fsdp_weights as merge_fsdp_weights

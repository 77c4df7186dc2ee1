"""The names of ``accelerate.utils.launch``: functions started in several processes.

The functions that make commands and variables from the arguments of accelerate's own parser are not: `bigmodel launch`
reads its arguments otherwise (`bigmodel.commands.launch`).
"""

from bigmodel.compat.refused import SAGEMAKER, TPU, refused
from bigmodel.compat.starting import PrepareForLaunch as PrepareForLaunch
from bigmodel.compat.starting import env_var_path_add as env_var_path_add

_COMMANDS = "commands are not made from accelerate's arguments; use bigmodel.commands.launch.launch_command"

prepare_deepspeed_cmd_env = refused("prepare_deepspeed_cmd_env", _COMMANDS)
prepare_extend_env_parallelism_config = refused("prepare_extend_env_parallelism_config", _COMMANDS)
prepare_multi_gpu_env = refused("prepare_multi_gpu_env", _COMMANDS)
prepare_simple_launcher_cmd_env = refused("prepare_simple_launcher_cmd_env", _COMMANDS)
setup_fp8_env = refused("setup_fp8_env", _COMMANDS)
prepare_sagemager_args_inputs = refused("prepare_sagemager_args_inputs", SAGEMAKER)
prepare_tpu = refused("prepare_tpu", TPU)

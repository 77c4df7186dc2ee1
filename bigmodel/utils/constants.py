"""The names of ``accelerate.utils.constants``: files in training checkpoints, and what options may be."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from bigmodel.compat.hooks.casting import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from bigmodel.train.strategies.sharded.strategy import MODEL_FOLDER

from .files import MODEL_NAME as MODEL_NAME
from .files import OPTIMIZER_NAME as OPTIMIZER_NAME
from .files import RNG_STATE_NAME as RNG_STATE_NAME
from .files import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from .files import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from .files import SAMPLER_NAME as SAMPLER_NAME
from .files import SCALER_NAME as SCALER_NAME
from .files import SCHEDULER_NAME as SCHEDULER_NAME
from .files import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from .files import WEIGHTS_NAME as WEIGHTS_NAME

SAFE_MODEL_NAME = "model"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"
FSDP_MODEL_NAME = MODEL_FOLDER

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"

SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]

CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *CUDA_DISTRIBUTED_TYPES,
    *(f"MULTI_{device}" for device in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON")),
]
TORCH_LAUNCH_PARAMS = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path"),
    *("log_dir", "r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
]

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}

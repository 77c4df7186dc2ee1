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
FSDP2_PYTORCH_VERSION = "2.6.0"
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}

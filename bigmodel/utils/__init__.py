"""What scripts import from `accelerate.utils`, under the same names: `from bigmodel.utils import set_seed`.

Every public name of `bigmodel` is here, too. Names are imported when they are first used.

Not here, because there is nothing they could mean: Megatron-LM, TPU (XLA), SageMaker, MS-AMP and TransformerEngine; the
folder of `.dat` files for offloaded weights (a checkpoint is used where it lies); bitsandbytes' own loader
(transformers' `BitsAndBytesConfig` does that); and helpers by which accelerate's own command line starts processes.
"""

from __future__ import annotations

import importlib
from typing import Any

import bigmodel

_MODULES: dict[str, tuple[str, ...]] = {
    "bigmodel.checkpoint": ("load_state_dict",),
    "bigmodel.plan.device_map": ("clean_device_map",),
    "bigmodel.profile.dtypes": ("CustomDtype", "dtype_byte_size"),
    "bigmodel.profile.ties": ("retie_parameters",),
    "bigmodel.train.compiling": ("compile_regions",),
    "bigmodel.train.operations.nested": ("find_device", "honor_type", "is_namedtuple", "is_torch_tensor"),
    "bigmodel.utils.available": (
        "is_aim_available",
        "is_bf16_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp16_available",
        "is_fp8_available",
        "is_hpu_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_mlu_available",
        "is_mps_available",
        "is_musa_available",
        "is_npu_available",
        "is_pandas_available",
        "is_peft_available",
        "is_pynvml_available",
        "is_rich_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_sdaa_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_timm_available",
        "is_torch_xla_available",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_xpu_available",
    ),
    "bigmodel.utils.environment": (
        "are_libraries_initialized",
        "clear_environment",
        "get_gpu_info",
        "get_int_from_env",
        "is_port_in_use",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "purge_accelerate_environment",
        "str_to_bool",
    ),
    "bigmodel.utils.files": (
        "MODEL_NAME",
        "OPTIMIZER_NAME",
        "RNG_STATE_NAME",
        "SAFE_WEIGHTS_INDEX_NAME",
        "SAFE_WEIGHTS_NAME",
        "SAMPLER_NAME",
        "SCALER_NAME",
        "SCHEDULER_NAME",
        "WEIGHTS_INDEX_NAME",
        "WEIGHTS_NAME",
        "load",
        "save",
    ),
    "bigmodel.utils.models": (
        "extract_model_from_parallel",
        "has_compiled_regions",
        "id_tensor_storage",
        "is_compiled_module",
        "is_peft_model",
        "model_has_dtensor",
        "named_module_tensors",
        "set_module_tensor_to_device",
        "wait_for_everyone",
    ),
    "bigmodel.utils.structures": (
        "TensorInformation",
        "convert_bytes",
        "convert_file_size_to_int",
        "convert_outputs_to_fp32",
        "get_data_structure",
        "get_pretty_name",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_tensor_information",
        "merge_dicts",
        "pad_input_tensors",
        "recursive_getattr",
    ),
    "bigmodel.utils.versions": ("compare_versions", "is_torch_version"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted({*_HOME, *bigmodel.__all__} - {"__version__"})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in bigmodel.__all__:
        value = getattr(bigmodel, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""bigmodel.utils has what scripts import from accelerate.utils."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import bigmodel
from bigmodel import utils

# Names of accelerate.utils that are not here, by the reason why.
NOT_HERE = {
    "Megatron-LM, SageMaker, TPU and other devices are not supported": """
        AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronLMDummyDataLoader
        MegatronLMDummyScheduler MegatronLMPlugin add_model_config_to_megatron_parser
        avg_losses_across_data_parallel_group SageMakerDistributedType prepare_sagemager_args_inputs
        install_xla prepare_tpu is_amdsmi_available is_xccl_available
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION""",
    "fp8 is torchao's alone": """
        MSAMPRecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast convert_model
        convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers
        has_transformer_engine_layers torchao_required""",
    "bitsandbytes models are loaded by transformers": """
        BnbQuantizationConfig load_and_quantize_model has_4bit_bnb_layers""",
    "context and sequence parallelism are not supported": """
        TorchContextParallelConfig DeepSpeedSequenceParallelConfig""",
    "parts of the planner, the strategies and the launcher, which have parts of their own here": """
        clean_state_dict_for_safetensors compile_regions_deepspeed compile_regions_fsdp2
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper GatheredParameters
        deepspeed_required map_pytorch_optim_to_deepspeed prepare_deepspeed_cmd_env
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied
        fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model
        fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_module_children_bottom_up
        get_current_device_type get_cpu_distributed_information check_cuda_p2p_ib_support set_numa_affinity
        prepare_multi_gpu_env prepare_simple_launcher_cmd_env PrepareForLaunch
        TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS is_weights_only_available""",
}


MODULES = {
    *("constants", "dataclasses", "deepspeed", "environment", "fsdp_utils", "imports", "memory", "modeling"),
    *("offload", "operations", "other", "random", "versions"),
}


def test_every_name_can_be_imported() -> None:
    assert all(getattr(utils, name) is not None for name in utils.__all__)
    assert set(utils.__all__) >= set(bigmodel.__all__) - {"__version__"}
    assert set(dir(utils)) - set(utils.__all__) == MODULES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'bigmodel\.utils' has no attribute 'nothing'"):
        utils.__getattr__("nothing")


def test_every_missing_name_of_accelerate_has_a_reason() -> None:
    theirs = importlib.import_module("accelerate.utils")
    public = {
        name for name in dir(theirs) if not name.startswith("_") and not isinstance(getattr(theirs, name), ModuleType)
    }
    reasoned = {name for names in NOT_HERE.values() for name in names.split()}
    assert public - set(utils.__all__) - reasoned == set()
    assert reasoned & set(utils.__all__) == set()

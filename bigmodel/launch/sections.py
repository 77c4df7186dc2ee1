"""The nested sections of a launch configuration: DeepSpeed, FSDP, parallelism, torch.compile, fp8.

Names, meanings and environment variables are accelerate's, so its files and the scripts written for it work unchanged.
An option left at None is not passed on: the training side then takes its own default.
"""

from __future__ import annotations

from dataclasses import dataclass

from .options import option

OFFLOAD_DEVICES = ("none", "cpu", "nvme")


@dataclass
class DeepSpeedSection:
    """`deepspeed_config`: ZeRO stage and offload."""

    deepspeed_config_file: str | None = option(
        None, "Path of a DeepSpeed JSON configuration.", env="ACCELERATE_DEEPSPEED_CONFIG_FILE"
    )
    zero_stage: int | None = option(
        None,
        "ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 parameters too.",
        env="ACCELERATE_DEEPSPEED_ZERO_STAGE",
        choices=("0", "1", "2", "3"),
    )
    offload_optimizer_device: str | None = option(
        None,
        "Where optimizer state lives.",
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        choices=OFFLOAD_DEVICES,
    )
    offload_param_device: str | None = option(
        None,
        "Where parameters live (stage 3).",
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        choices=OFFLOAD_DEVICES,
    )
    offload_optimizer_nvme_path: str | None = option(
        None, "Folder for optimizer state on disk.", env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"
    )
    offload_param_nvme_path: str | None = option(
        None, "Folder for parameters on disk.", env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"
    )
    gradient_accumulation_steps: int | None = option(
        None,
        "Batches per optimizer step, whose gradients are accumulated.",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    gradient_clipping: float | None = option(None, "Largest norm of the gradients.", env="ACCELERATE_GRADIENT_CLIPPING")
    zero3_init_flag: bool | None = option(
        None, "Shard parameters while the model is built (stage 3).", env="ACCELERATE_DEEPSPEED_ZERO3_INIT"
    )
    zero3_save_16bit_model: bool | None = option(
        None,
        "Gather 16-bit weights when the model is saved (stage 3).",
        env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    )
    deepspeed_moe_layer_cls_names: str | None = option(
        None,
        "Class names of mixture-of-experts blocks, comma separated.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    )
    deepspeed_multinode_launcher: str | None = option(
        None, "Only 'standard': one `bigmodel launch` per machine.", choices=("standard",)
    )


@dataclass
class FsdpSection:
    """`fsdp_config`: fully sharded data parallelism (FSDP2)."""

    fsdp_version: int | None = option(None, "1 and 2 both run FSDP2.", env="FSDP_VERSION", choices=("1", "2"))
    fsdp_reshard_after_forward: str | None = option(
        None,
        "true: free gathered parameters after forward. Version 1 files give a sharding strategy here.",
        env="FSDP_RESHARD_AFTER_FORWARD",
    )
    fsdp_sharding_strategy: str | None = option(
        None, "The name of FSDP1 for reshard_after_forward.", env="FSDP_SHARDING_STRATEGY"
    )
    fsdp_offload_params: bool | None = option(
        None, "Keep sharded parameters, gradients and optimizer state in RAM.", env="FSDP_OFFLOAD_PARAMS"
    )
    fsdp_auto_wrap_policy: str | None = option(
        None,
        "How modules are grouped into sharded units.",
        env="FSDP_AUTO_WRAP_POLICY",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = option(
        None, "Class names of the blocks to wrap, comma separated.", env="FSDP_TRANSFORMER_CLS_TO_WRAP"
    )
    fsdp_min_num_params: int | None = option(
        None, "Smallest number of parameters that makes a module its own unit.", env="FSDP_MIN_NUM_PARAMS"
    )
    fsdp_state_dict_type: str | None = option(
        None,
        "How save_state writes the model.",
        env="FSDP_STATE_DICT_TYPE",
        choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
    )
    fsdp_backward_prefetch: str | None = option(
        None,
        "Accepted for version 1; FSDP2 always prefetches in backward.",
        env="FSDP_BACKWARD_PREFETCH",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    )
    fsdp_forward_prefetch: bool | None = option(None, "Accepted for version 1.", env="FSDP_FORWARD_PREFETCH")
    fsdp_use_orig_params: bool | None = option(
        None, "Accepted for version 1; FSDP2 always keeps original parameters.", env="FSDP_USE_ORIG_PARAMS"
    )
    fsdp_sync_module_states: bool | None = option(
        None, "Every rank starts from rank 0's weights.", env="FSDP_SYNC_MODULE_STATES"
    )
    fsdp_cpu_ram_efficient_loading: bool | None = option(
        None, "Only rank 0 holds the full weights while loading.", env="FSDP_CPU_RAM_EFFICIENT_LOADING"
    )
    fsdp_activation_checkpointing: bool | None = option(
        None, "Recompute activations of each unit in backward.", env="FSDP_ACTIVATION_CHECKPOINTING"
    )
    fsdp_activation_checkpointing_offload: bool | None = option(
        None, "Keep checkpointed activations in RAM.", env="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"
    )
    fsdp_ignored_modules: str | None = option(
        None, "Regular expression of module names left unsharded.", env="FSDP_IGNORED_MODULES"
    )


@dataclass
class ParallelismSection:
    """`parallelism_config`: the sizes of the device mesh."""

    parallelism_config_dp_replicate_size: int | None = option(
        None, "Replicas of the sharded model.", env="PARALLELISM_CONFIG_DP_REPLICATE_SIZE"
    )
    parallelism_config_dp_shard_size: int | None = option(
        None, "Ranks that share one copy of the parameters.", env="PARALLELISM_CONFIG_DP_SHARD_SIZE"
    )
    parallelism_config_tp_size: int | None = option(
        None, "Ranks that split each layer.", env="PARALLELISM_CONFIG_TP_SIZE"
    )
    parallelism_config_cp_size: int | None = option(
        None, "Context parallelism; only 1.", env="PARALLELISM_CONFIG_CP_SIZE"
    )
    parallelism_config_cp_backend: str | None = option(
        None, "Backend of context parallelism.", env="PARALLELISM_CONFIG_CP_BACKEND"
    )
    parallelism_config_cp_comm_strategy: str | None = option(
        None, "Communication of context parallelism.", env="PARALLELISM_CONFIG_CP_COMM_STRATEGY"
    )
    parallelism_config_sp_size: int | None = option(
        None, "Sequence parallelism; only 1.", env="PARALLELISM_CONFIG_SP_SIZE"
    )
    parallelism_config_sp_backend: str | None = option(
        None, "Backend of sequence parallelism.", env="PARALLELISM_CONFIG_SP_BACKEND"
    )


@dataclass
class DynamoSection:
    """`dynamo_config`: torch.compile."""

    dynamo_backend: str | None = option(None, "Backend of torch.compile.", env="ACCELERATE_DYNAMO_BACKEND")
    dynamo_mode: str | None = option(
        None,
        "Mode of torch.compile.",
        env="ACCELERATE_DYNAMO_MODE",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    dynamo_use_fullgraph: bool | None = option(
        None, "Refuse graph breaks.", env="ACCELERATE_DYNAMO_USE_FULLGRAPH", switch=True
    )
    dynamo_use_dynamic: bool | None = option(
        None, "Compile for changing shapes.", env="ACCELERATE_DYNAMO_USE_DYNAMIC", switch=True
    )
    dynamo_use_regional_compilation: bool | None = option(
        None, "Compile repeated blocks once.", env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", switch=True
    )


@dataclass
class Fp8Section:
    """`fp8_config`: training in 8-bit floating point through torchao."""

    fp8_backend: str | None = option(None, "Only 'ao' (torchao).", env="ACCELERATE_FP8_BACKEND", choices=("ao",))
    fp8_enable_fsdp_float8_all_gather: bool | None = option(
        None, "Gather FSDP2 parameters in fp8.", env="ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"
    )
    fp8_pad_inner_dim: bool | None = option(
        None, "Pad matrices to multiples of 16.", env="ACCELERATE_FP8_PAD_INNER_DIM"
    )

"""The names of ``accelerate.utils.dataclasses``: plugins and settings."""

from bigmodel.compat.classes import FP8RecipeKwargs as FP8RecipeKwargs
from bigmodel.compat.classes import get_module_class_from_name as get_module_class_from_name
from bigmodel.compat.refused import BITSANDBYTES, MEGATRON, MSAMP, TRANSFORMER_ENGINE, refused
from bigmodel.compat.settings import AmaxComputeAlgorithm as AmaxComputeAlgorithm
from bigmodel.compat.settings import Backend as Backend
from bigmodel.compat.settings import ComputeEnvironment as ComputeEnvironment
from bigmodel.compat.settings import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from bigmodel.compat.settings import FP8BackendType as FP8BackendType
from bigmodel.compat.settings import FP8Format as FP8Format
from bigmodel.compat.settings import OptLevel as OptLevel
from bigmodel.compat.settings import ProfilerActivity as ProfilerActivity
from bigmodel.compat.settings import SageMakerDistributedType as SageMakerDistributedType
from bigmodel.compat.settings import TorchContextParallelConfig as TorchContextParallelConfig
from bigmodel.profile import CustomDtype as CustomDtype
from bigmodel.train import AORecipeKwargs as AORecipeKwargs
from bigmodel.train import AutocastKwargs as AutocastKwargs
from bigmodel.train import DataLoaderConfiguration as DataLoaderConfiguration
from bigmodel.train import DDPCommunicationHookType as DDPCommunicationHookType
from bigmodel.train import DeepSpeedPlugin as DeepSpeedPlugin
from bigmodel.train import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from bigmodel.train import DistributedType as DistributedType
from bigmodel.train import DynamoBackend as DynamoBackend
from bigmodel.train import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from bigmodel.train import GradientAccumulationPlugin as GradientAccumulationPlugin
from bigmodel.train import GradScalerKwargs as GradScalerKwargs
from bigmodel.train import InitProcessGroupKwargs as InitProcessGroupKwargs
from bigmodel.train import KwargsHandler as KwargsHandler
from bigmodel.train import LoggerType as LoggerType
from bigmodel.train import PrecisionType as PrecisionType
from bigmodel.train import ProfileKwargs as ProfileKwargs
from bigmodel.train import ProjectConfiguration as ProjectConfiguration
from bigmodel.train import RNGType as RNGType
from bigmodel.train import TorchDynamoPlugin as TorchDynamoPlugin
from bigmodel.train import TorchTensorParallelConfig as TorchTensorParallelConfig
from bigmodel.train import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from bigmodel.train.types import BaseEnum as BaseEnum
from bigmodel.train.types import EnumWithContains as EnumWithContains
from bigmodel.utils.structures import TensorInformation as TensorInformation

BnbQuantizationConfig = refused("BnbQuantizationConfig", BITSANDBYTES)
MSAMPRecipeKwargs = refused("MSAMPRecipeKwargs", MSAMP)
TERecipeKwargs = refused("TERecipeKwargs", TRANSFORMER_ENGINE)
MegatronLMPlugin = refused("MegatronLMPlugin", MEGATRON)
add_model_config_to_megatron_parser = refused("add_model_config_to_megatron_parser", MEGATRON)
parse_bert_config = refused("parse_bert_config", MEGATRON)
parse_glm4_moe_config = refused("parse_glm4_moe_config", MEGATRON)
parse_gpt2_config = refused("parse_gpt2_config", MEGATRON)
parse_llama_config = refused("parse_llama_config", MEGATRON)
parse_t5_config = refused("parse_t5_config", MEGATRON)
MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, object] = {}
"""No model is given to Megatron-LM."""

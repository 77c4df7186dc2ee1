"""The names of ``accelerate.utils.dataclasses``: plugins and settings."""

from bigmodel.compat.classes import ComputeEnvironment as ComputeEnvironment
from bigmodel.compat.classes import FP8RecipeKwargs as FP8RecipeKwargs
from bigmodel.compat.classes import get_module_class_from_name as get_module_class_from_name
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
from bigmodel.utils.structures import TensorInformation as TensorInformation

"""The names of ``accelerate.accelerator``: the Accelerator and what its arguments are made of."""

from bigmodel.train import Accelerator as Accelerator
from bigmodel.train import DataLoaderConfiguration as DataLoaderConfiguration
from bigmodel.train import DistributedType as DistributedType
from bigmodel.train import GradientAccumulationPlugin as GradientAccumulationPlugin
from bigmodel.train import ProjectConfiguration as ProjectConfiguration
from bigmodel.utils.available import is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available
from bigmodel.utils.available import is_xpu_available as is_xpu_available

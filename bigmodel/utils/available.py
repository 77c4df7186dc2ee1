"""The functions is_..._available(): whether a package is installed, or a device or precision can be used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial

import torch
from torch.torch_version import TorchVersion

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.precision.mixed import check_fp8


def _installed(*modules: str) -> bool:
    """Whether any of these modules is importable; none is imported."""
    return any(_found(module) for module in modules)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a parent package is missing, or the module is partially initialised
        return False


def _at_least(package: str, version: str) -> bool:
    return bool(TorchVersion(importlib.metadata.version(package)) >= version)


def _unsupported(check_device: bool = False) -> bool:
    """False: this library does not support such devices."""
    return False


def is_hpu_available(init_hccl: bool = False) -> bool:
    """False: this library does not support such devices."""
    return False


is_aim_available = partial(_installed, "aim")
is_boto3_available = partial(_installed, "boto3")
is_clearml_available = partial(_installed, "clearml")
is_comet_ml_available = partial(_installed, "comet_ml")
is_datasets_available = partial(_installed, "datasets")
is_deepspeed_available = partial(_installed, "deepspeed")
is_dvclive_available = partial(_installed, "dvclive")
is_lomo_available = partial(_installed, "lomo_optim")
is_matplotlib_available = partial(_installed, "matplotlib")
is_megatron_lm_available = partial(_installed, "megatron")
is_mlflow_available = partial(_installed, "mlflow")
is_pandas_available = partial(_installed, "pandas")
is_peft_available = partial(_installed, "peft")
is_pippy_available = partial(_installed, "torch.distributed.pipelining")
is_pynvml_available = partial(_installed, "pynvml")
is_sagemaker_available = partial(_installed, "sagemaker")
is_schedulefree_available = partial(_installed, "schedulefree")
is_swanlab_available = partial(_installed, "swanlab")
is_tensorboard_available = partial(_installed, "tensorboard", "tensorboardX")
is_timm_available = partial(_installed, "timm")
is_torchao_available = partial(_installed, "torchao")
is_torchdata_available = partial(_installed, "torchdata")
is_torchdata_stateful_dataloader_available = partial(_installed, "torchdata.stateful_dataloader")
is_torchvision_available = partial(_installed, "torchvision")
is_trackio_available = partial(_installed, "trackio")
is_transformer_engine_available = partial(_installed, "transformer_engine")
is_transformers_available = partial(_installed, "transformers")
is_triton_available = partial(_installed, "triton")
is_wandb_available = partial(_installed, "wandb")

is_amdsmi_available = partial(_installed, "amdsmi")
is_import_timer_available = partial(_installed, "import_timer")
is_pytest_available = partial(_installed, "pytest")
is_tqdm_available = partial(_installed, "tqdm")

is_habana_gaudi1 = is_msamp_available = is_neuron_available = is_transformer_engine_mxfp8_available = _unsupported
is_mlu_available = is_musa_available = is_npu_available = is_sdaa_available = _unsupported


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in this version or a later one."""
    return _installed("bitsandbytes") and (min_version is None or _at_least("bitsandbytes", min_version))


is_4bit_bnb_available = partial(is_bnb_available, "0.39.0")
is_8bit_bnb_available = partial(is_bnb_available, "0.37.2")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, in this version or a later one."""
    return _installed("numpy") and _at_least("numpy", min_version)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """False: this library does not train through XLA."""
    return False


def is_cuda_available() -> bool:
    """Whether there is a CUDA (or ROCm) GPU."""
    return torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is an Intel GPU."""
    return torch.xpu.is_available()


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether there is a bitsandbytes that computes on other devices than CUDA GPUs, the processor among them."""
    if not is_bnb_available():
        return False
    import bitsandbytes

    return "multi_backend" in getattr(bitsandbytes, "features", ())


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is an Apple GPU. `min_version` is older than any PyTorch this library runs on."""
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the default device computes in bfloat16."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Whether the default device computes in float16: all do."""
    return True


def is_fp8_available() -> bool:
    """Whether mixed_precision="fp8" works here: an NVIDIA GPU that computes in fp8, and torchao."""
    try:
        check_fp8(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except TrainError:
        return False
    return True


def is_rich_available() -> bool:
    """Whether the package rich is installed and ``ACCELERATE_ENABLE_RICH`` asks for it."""
    return _installed("rich") and environment.flag("ACCELERATE_ENABLE_RICH", False)


def is_rocm_available() -> bool:
    """Whether PyTorch is built for AMD's GPUs and finds one."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_torch_distributed_available() -> bool:
    """Whether PyTorch is built with torch.distributed."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """True: PyTorch loads files with weights only."""
    return True


def is_xccl_available() -> bool:
    """Whether PyTorch is built with the collectives of Intel's GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()

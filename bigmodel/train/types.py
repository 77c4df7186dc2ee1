"""The enumerations of the training side."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any, Literal


class EnumWithContains(EnumMeta):
    """The class of enumerations that may be asked for values: ``"fp16" in PrecisionType``."""

    def __contains__(cls, item: Any) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration that prints as its values and lists them."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values in the order of definition."""
        return [str(member.value) for member in cls]


class _StringEnum(str, BaseEnum):
    """An enumeration whose members compare, hash and print as their string values."""


class DistributedType(_StringEnum):
    """The kinds of distributed training. Members print as ``DistributedType.FSDP``, as accelerate's do."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    TP = "TP"
    # Never in use: programs compare with them.
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class PrecisionType(_StringEnum):
    """The mixed-precision modes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class RNGType(_StringEnum):
    """The random number generators that can be synchronised across processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MPS = "mps"
    GENERATOR = "generator"
    # Never in use: programs compare with them.
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"


class DynamoBackend(_StringEnum):
    """The backends of `torch.compile` that PyTorch and related packages register; NO compiles nothing."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    IPEX = "IPEX"
    TVM = "TVM"
    # Of older versions of PyTorch and of other devices: PyTorch refuses those that it does not know.
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(_StringEnum):
    """The names of the built-in trackers."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class DDPCommunicationHookType(_StringEnum):
    """The gradient compression hooks of `DistributedDataParallel`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


Precision = Literal["no", "fp16", "bf16", "fp8"]

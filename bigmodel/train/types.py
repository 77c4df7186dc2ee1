"""The enumerations of the training side."""

from __future__ import annotations

from enum import Enum
from typing import Literal


class _StringEnum(str, Enum):
    """An enumeration whose members compare, hash and print as their string values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values in the order of definition."""
        return [str(member.value) for member in cls]


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

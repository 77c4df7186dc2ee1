"""Names of accelerate that stand for what this project does not support.

They can be imported, as scripts import them whether they use them or not, subclassed and named in `isinstance`; calling
one is an error that says what to use instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import TrainError

MEGATRON = "Megatron-LM is not supported; use FSDP (fsdp_plugin), tensor parallelism (parallelism_config) or both"
TRANSFORMER_ENGINE = "TransformerEngine is not supported; use AORecipeKwargs (torchao) for 8-bit training"
MSAMP = "MS-AMP is not supported; use AORecipeKwargs (torchao) for 8-bit training"
TPU = "TPUs are not supported; train on CUDA GPUs, MPS or the CPU"
SAGEMAKER = "SageMaker is not supported; run `bigmodel launch` on each machine of the job"
BITSANDBYTES = (
    "models are not quantised with bitsandbytes here; load them by transformers with "
    "quantization_config=BitsAndBytesConfig(...), or give dispatch_model offload_dtype="
)


class Refused(type):
    """The class of these names: a call of one of them, or of a subclass, raises."""

    _why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TrainError(f"{cls.__name__}: {cls._why}")


def refused(name: str, why: str) -> Any:
    """Return the object that stands for `name`.

    Args:
        why: What is not supported, and what to use instead.

    Raises:
        TrainError: When it is called.
    """
    return Refused(name, (), {"_why": why, "__doc__": f"Not supported: {why}."})

"""Settings and enumerations of ``accelerate.utils.dataclasses`` for what runs on devices or services not used here.

Programs compare with them and make them whether or not they are used; what is not supported is refused where it would
take effect.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ..errors import TrainError

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]


class ComputeEnvironment(str, Enum):
    """Environment of a launch: machines that the user starts it on. SageMaker's exists for comparison."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum):
    """Kinds of distributed training on SageMaker, none of which is supported."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(str, Enum):
    """Packages for 8-bit training: AO (torchao) is the one that is supported."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


@dataclass
class TorchContextParallelConfig:
    """Settings of context parallelism, which `ParallelismConfig` takes only with one rank.

    Attributes:
        cp_comm_strategy: "allgather" or "alltoall"; None reads ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``, else the first.

    Raises:
        TrainError: Another strategy.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise TrainError(f"cp_comm_strategy is {self.cp_comm_strategy!r}: give 'allgather' or 'alltoall'")


_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of DeepSpeed's sequence parallelism, which `ParallelismConfig` takes only with one rank.

    Fields left at None are read from ``PARALLELISM_CONFIG_SP_*``.

    Attributes:
        sp_seq_length: Tokens of every batch, if all have the same.
        sp_seq_length_is_variable: Batches may differ in length; by default they may.
        sp_attn_implementation: An attention of transformers, or a kernel of the Hub.

    Raises:
        TrainError: Batches have one length and it is not given, or the attention is not among those.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        prefix = "PARALLELISM_CONFIG_SP_"
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = os.environ.get(f"{prefix}SEQ_LENGTH_IS_VARIABLE", "true").lower() == "true"
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            given = os.environ.get(f"{prefix}SEQ_LENGTH")
            if given is None:
                raise TrainError("sp_seq_length_is_variable is False: give sp_seq_length")
            self.sp_seq_length = None if given == "None" else int(given)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = os.environ.get(f"{prefix}ATTN_IMPLEMENTATION")
        name = self.sp_attn_implementation
        if name is not None and name not in _ATTENTION and not ("/" in name and "flash-attn" in name):
            raise TrainError(
                f"sp_attn_implementation is {name!r}: give one of {', '.join(_ATTENTION)}, or a kernel of the Hub "
                "such as 'kernels-community/flash-attn2'"
            )

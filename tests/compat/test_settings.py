"""Settings of parallelism that is not done here: what they are by default and what they refuse."""

from __future__ import annotations

import pytest

from bigmodel.compat.settings import (
    ComputeEnvironment,
    DeepSpeedSequenceParallelConfig,
    FP8BackendType,
    SageMakerDistributedType,
    TorchContextParallelConfig,
)

CONTEXT = "PARALLELISM_CONFIG_CP_COMM_STRATEGY"
SEQUENCE = "PARALLELISM_CONFIG_SP_"


def test_enumerations_compare_with_texts() -> None:
    assert ComputeEnvironment("AMAZON_SAGEMAKER") == "AMAZON_SAGEMAKER"
    assert [each.value for each in SageMakerDistributedType] == ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"]
    assert [each.value for each in FP8BackendType] == ["NO", "TE", "MSAMP", "AO"]


def test_context_parallelism_gathers_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTEXT, raising=False)
    assert TorchContextParallelConfig().cp_comm_strategy == "allgather"
    monkeypatch.setenv(CONTEXT, "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    assert TorchContextParallelConfig("allgather").cp_comm_strategy == "allgather"
    with pytest.raises(ValueError, match="cp_comm_strategy is 'ring'"):
        TorchContextParallelConfig("ring")


def test_sequences_may_differ_in_length_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEQ_LENGTH", "SEQ_LENGTH_IS_VARIABLE", "ATTN_IMPLEMENTATION"):
        monkeypatch.delenv(SEQUENCE + name, raising=False)
    assert vars(DeepSpeedSequenceParallelConfig()) == {
        "sp_seq_length": None,
        "sp_seq_length_is_variable": True,
        "sp_attn_implementation": None,
    }
    with pytest.raises(ValueError, match="give sp_seq_length"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    monkeypatch.setenv(SEQUENCE + "SEQ_LENGTH_IS_VARIABLE", "False")
    monkeypatch.setenv(SEQUENCE + "SEQ_LENGTH", "64")
    assert DeepSpeedSequenceParallelConfig().sp_seq_length == 64


def test_attention_is_one_of_those_that_work_on_parts_of_sequences() -> None:
    for name in ("sdpa", "flash_attention_2", "kernels-community/flash-attn2"):
        assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=name).sp_attn_implementation == name
    with pytest.raises(ValueError, match="sp_attn_implementation is 'eager'"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")

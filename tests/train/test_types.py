"""Enumerations that are their values."""

from __future__ import annotations

import json

from bigmodel.train import DistributedType, PrecisionType, RNGType


def test_members_compare_hash_and_serialise_as_strings() -> None:
    assert PrecisionType.BF16 == "bf16"
    assert {PrecisionType.BF16: 1}["bf16"] == 1
    assert f"{PrecisionType.BF16}" == str(PrecisionType.BF16) == "bf16"
    assert json.dumps(DistributedType.MULTI_CPU) == '"MULTI_CPU"'
    assert PrecisionType("fp16") is PrecisionType.FP16
    assert PrecisionType.list() == ["no", "fp16", "bf16", "fp8"]
    assert "generator" in RNGType.list()


def test_kinds_of_training_print_as_those_of_accelerate_do() -> None:
    assert f"{DistributedType.FSDP}" == str(DistributedType.FSDP) == "DistributedType.FSDP"
    assert DistributedType.FSDP == "FSDP"


def test_enumerations_are_asked_for_values() -> None:
    assert "fp16" in PrecisionType
    assert "fp17" not in PrecisionType

"""`ClusterConfig`: made of accelerate's arguments, written, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.commands.config import load_config_from_file
from bigmodel.commands.config.config_args import BaseConfig, ClusterConfig
from bigmodel.compat.settings import ComputeEnvironment
from bigmodel.errors import LaunchError
from bigmodel.train import DistributedType

ARGUMENTS = {
    "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
    "distributed_type": DistributedType.FSDP,
    "mixed_precision": "bf16",
    "use_cpu": False,
    "debug": False,
    "num_processes": 4,
    "main_process_port": None,
    "deepspeed_config": {},
    "fsdp_config": {"fsdp_version": 2},
}


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_what_is_written_is_read_again(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"config.{form}"
    config = ClusterConfig(**ARGUMENTS)
    assert isinstance(config, BaseConfig)
    assert (config.distributed_type, config.num_processes, config.main_process_port) == ("FSDP", 4, None)
    getattr(config, f"to_{form}_file")(path)
    readers = [getattr(kind, f"from_{form}_file") for kind in (BaseConfig, ClusterConfig)]
    for found in (*(read(path) for read in readers), load_config_from_file(path)):
        assert isinstance(found, BaseConfig)
        assert found.to_dict() == config.to_dict()
    assert config.replace({"num_processes": 2}).to_dict() == {**config.to_dict(), "num_processes": 2}


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="use to_json_file"):
        ClusterConfig(num_processes=1).to_yaml_file(tmp_path / "config.json")
    with pytest.raises(LaunchError, match=r"does not end in \.json"):
        ClusterConfig(num_processes=1).to_json_file(tmp_path / "config.yaml")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(LaunchError, match="ClusterConfig: unknown key 'num_process'"):
        ClusterConfig(num_process=1)
    with pytest.raises(LaunchError, match="LOCAL_MACHINE"):
        ClusterConfig(compute_environment="AMAZON_SAGEMAKER")

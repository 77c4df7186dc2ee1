"""The command line: flags, then the script, then what belongs to the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import LaunchError
from bigmodel.launch import LaunchConfig, parse_launch, save_config

CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_what_follows_the_script_belongs_to_the_script() -> None:
    launch = parse_launch(["--num_processes", "2", "train.py", "--num_processes", "7", "-m", "--help", "--", "x"])
    assert launch.config.num_processes == 2
    assert launch.script == "train.py"
    assert launch.script_arguments == ("--num_processes", "7", "-m", "--help", "--", "x")
    assert launch.module is False


@pytest.mark.parametrize("flag", ["--num-processes", "--num_processes", "--num-processes=3", "--num_processes=3"])
def test_hyphens_and_underscores_are_the_same(flag: str) -> None:
    value = [] if "=" in flag else ["3"]
    assert parse_launch([flag, *value, "train.py"]).config.num_processes == 3


def test_values_keep_their_hyphens() -> None:
    assert parse_launch(["--rdzv-conf", "join-timeout=3", "t.py"]).config.rdzv_conf == "join-timeout=3"


def test_flags_win_over_the_file() -> None:
    file = str(CONFIGS / "deepspeed_stage_3.yaml")
    launch = parse_launch(["--config_file", file, "--zero_stage", "2", "--machine_rank=1", "train.py"])
    assert launch.config.deepspeed_config.zero_stage == 2
    assert launch.config.machine_rank == 1
    assert launch.config.num_processes == 4
    assert launch.explicit == {"zero_stage", "machine_rank"}
    assert launch.config_file == file


def test_flags_win_over_lines_that_are_no_valid_value(tmp_path: Path) -> None:
    path = tmp_path / "template.yaml"
    path.write_text("main_process_port: <PORT>\nfsdp_config: {fsdp_min_num_params: <COUNT>}\nnum_processes: 4\n")
    flags = ["--config_file", str(path), "--main_process_port", "29501", "--fsdp_min_num_params", "7"]
    config = parse_launch([*flags, "train.py"]).config
    assert (config.main_process_port, config.num_processes) == (29501, 4)
    with pytest.raises(LaunchError, match="main_process_port"):
        parse_launch(["--config_file", str(path), "train.py"])


def test_the_default_file_is_read_when_none_is_named(tmp_path: Path) -> None:
    save_config(LaunchConfig(num_processes=5), tmp_path / "bigmodel" / "default_config.yaml")
    assert parse_launch(["train.py"]).config.num_processes == 5


@pytest.mark.parametrize(
    ("flag", "kind"), [("--multi_gpu", "MULTI_GPU"), ("--use_fsdp", "FSDP"), ("--use-deepspeed", "DEEPSPEED")]
)
def test_a_kind_of_training_is_one_flag(flag: str, kind: str) -> None:
    assert parse_launch([flag, "train.py"]).config.distributed_type == kind


def test_gpus_asked_for_by_a_flag_win_over_a_file_that_says_cpu(tmp_path: Path) -> None:
    save_config(LaunchConfig(use_cpu=True), tmp_path / "cpu.yaml")
    assert parse_launch(["--config_file", str(tmp_path / "cpu.yaml"), "--multi_gpu", "t.py"]).config.use_cpu is False


def test_modules_and_programs() -> None:
    assert parse_launch(["-m", "package.train", "--x"]).module is True
    assert parse_launch(["--no_python", "--", "./run.sh"]).no_python is True
    assert parse_launch(["--cpu", "train.py"]).config.use_cpu is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_proceses", "2", "t.py"], "unknown flag '--num_proceses'. Did you mean '--num_processes'"),
        (["--num_processes"], "--num_processes needs a value"),
        (["--num_processes", "two", "t.py"], "num_processes is 'two'; it must be a whole number"),
        (["--cpu"], "no script given. Usage"),
        ([], "no script given. Usage"),
        (["--use_fsdp", "--use_deepspeed", "t.py"], "--use_deepspeed and --use_fsdp exclude each other"),
        (["--multi_gpu", "--cpu", "t.py"], "--multi_gpu and --cpu exclude each other"),
        (["--tpu", "t.py"], "--tpu: TPUs are not supported"),
        (["--megatron_lm_tp_degree", "2", "t.py"], "Megatron-LM is not supported; use FSDP"),
        (["--aws_access_key_id", "x", "t.py"], "SageMaker is not supported"),
        (["--deepspeed_multinode_launcher", "pdsh", "t.py"], "deepspeed_multinode_launcher is 'pdsh'"),
    ],
)
def test_mistakes_get_one_clear_error(arguments: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_launch(arguments)

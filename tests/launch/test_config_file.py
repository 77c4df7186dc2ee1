"""Configuration files: accelerate's are read unchanged, mistakes raise one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import LaunchError
from bigmodel.launch import LaunchConfig, default_config_path, find_default_config, load_config, save_config
from bigmodel.launch.config_file import basic_config, write_basic_config

CONFIGS = Path(__file__).parent / "configs"


def written(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_one_machine_with_two_processes() -> None:
    config = load_config(CONFIGS / "one_machine_two_processes.yaml")
    assert (config.distributed_type, config.num_machines, config.num_processes) == ("MULTI_GPU", 1, 2)
    assert (config.mixed_precision, config.gpu_ids, config.use_cpu) == ("no", "all", False)


def test_two_machines_with_four_processes() -> None:
    config = load_config(CONFIGS / "two_machines_four_processes.yaml")
    assert (config.num_machines, config.num_processes, config.machine_rank) == (2, 4, 0)
    assert (config.main_process_ip, config.main_process_port, config.rdzv_backend) == ("127.0.0.1", 29511, "static")


def test_fp16() -> None:
    assert load_config(CONFIGS / "two_processes_fp16.yaml").mixed_precision == "fp16"


def test_deepspeed_stage_3() -> None:
    config = load_config(CONFIGS / "deepspeed_stage_3.yaml")
    deepspeed = config.deepspeed_config
    assert config.distributed_type == "DEEPSPEED"
    assert (deepspeed.zero_stage, deepspeed.gradient_accumulation_steps) == (3, 4)
    assert (deepspeed.offload_param_device, deepspeed.zero3_init_flag) == ("none", False)


def test_a_placeholder_left_in_the_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "num_machines: 2\nmain_process_port: 端口号\n")
    with pytest.raises(LaunchError, match=r"config.yaml: main_process_port is '端口号'; it must be a whole number"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_proceses: 2", r"config.yaml: unknown key 'num_proceses'. Did you mean 'num_processes'\?"),
        ("fsdp_config:\n  fsdp_ofload_params: true", r"unknown key fsdp_config.fsdp_ofload_params. Did you mean"),
        ("num_processes: two", "num_processes is 'two'; it must be a whole number"),
        ("mixed_precision: fp12", "mixed_precision is 'fp12', which is not one of: no, fp16, bf16, fp8"),
        ("distributed_type: XLA", "TPUs are not supported; train on GPUs"),
        ("distributed_type: MEGATRON_LM", "Megatron-LM is not supported; use FSDP"),
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker is not supported; run `bigmodel launch`"),
        ("tpu_use_cluster: true", "TPUs are not supported"),
        ("deepspeed_config:\n  deepspeed_hostfile: hosts", "DeepSpeed's own launchers are not used"),
        ("deepspeed_config: 3", "deepspeed_config must hold `key: value` lines, not 3"),
        ("a: [1\nb: 2", "is not valid YAML at line 2, column 2"),
        ("- one\n- two", "must hold `key: value` lines, not a list"),
    ],
)
def test_mistakes_get_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        load_config(written(tmp_path, text))


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"does not exist. Write one with `bigmodel config --config_file"):
        load_config(tmp_path / "none.yaml")


def test_json_is_read_and_its_errors_are_placed(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, '{"num_processes": 2}', "c.json")).num_processes == 2
    with pytest.raises(LaunchError, match="not valid JSON at line 1, column 2"):
        load_config(written(tmp_path, "{oops", "d.json"))


def test_keys_of_old_files_are_understood(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "fp16: true\ndynamo_backend: INDUCTOR\n"))
    assert (config.mixed_precision, config.dynamo_config.dynamo_backend) == ("fp16", "INDUCTOR")


def test_an_unquoted_no_is_the_precision_no(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "mixed_precision: no")).mixed_precision == "no"


@pytest.mark.parametrize("written_as", ["true", "'true'", "True"])
def test_resharding_is_on_or_off_as_accelerate_writes_it(tmp_path: Path, written_as: str) -> None:
    text = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: {written_as}\n"
    config = load_config(written(tmp_path, text))
    assert config.fsdp_config.fsdp_reshard_after_forward.lower() == "true"
    assert load_config(save_config(config, tmp_path / "copy.yaml")) == config


def test_keys_of_a_section_may_leave_out_its_prefix(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "fsdp_config: {version: 2}\nparallelism_config: {tp_size: 2}\n"))
    assert (config.fsdp_config.fsdp_version, config.parallelism_config.parallelism_config_tp_size) == (2, 2)


@pytest.mark.slow
def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    for source in sorted(CONFIGS.iterdir()):
        config = load_config(source)
        for name in ("copy.yaml", "copy.json"):
            assert load_config(save_config(config, tmp_path / "new" / name)) == config
    assert not list((tmp_path / "new").glob(".*"))


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    written(tmp_path, "", "file")
    with pytest.raises(LaunchError, match="Cannot write the configuration file"):
        save_config(LaunchConfig(), tmp_path / "file" / "config.yaml")


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "num_processes": st.integers(1, 999),
            "main_process_ip": st.sampled_from(["127.0.0.1", "node-0", "fe80::1"]),
            "mixed_precision": st.sampled_from(["no", "fp16", "bf16", "fp8"]),
            "use_cpu": st.booleans(),
            "zero_stage": st.integers(0, 3),
            "gradient_clipping": st.floats(0.1, 100),
            "fsdp_offload_params": st.booleans(),
            "parallelism_config_tp_size": st.integers(1, 64),
        },
    )
)
def test_any_configuration_survives_its_file(tmp_path_factory: pytest.TempPathFactory, values: dict) -> None:
    config = LaunchConfig().replace(values)
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    assert load_config(save_config(config, path)) == config


def test_our_default_file_comes_before_accelerates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    assert find_default_config() is None
    theirs = tmp_path / "cache" / "huggingface" / "accelerate" / "default_config.yaml"
    save_config(LaunchConfig(), theirs)
    assert find_default_config() == theirs
    ours = save_config(LaunchConfig(), default_config_path())
    assert ours == tmp_path / "config" / "bigmodel" / "default_config.yaml"
    assert find_default_config() == ours


@pytest.mark.parametrize(("gpus", "kind", "processes"), [(0, "NO", 1), (1, "NO", 1), (4, "MULTI_GPU", 4)])
def test_one_process_for_each_gpu(monkeypatch, gpus: int, kind: str, processes: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = basic_config("bf16")
    assert (found.distributed_type, found.num_processes, found.use_cpu) == (kind, processes, gpus == 0)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert write_basic_config("no", path) == path
    path.write_text(path.read_text().replace("num_processes: 1", "num_processes: 9"))
    assert write_basic_config("no", path) is None
    assert load_config(path).num_processes == 9


def test_a_folder_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="it is a folder"):
        write_basic_config("no", tmp_path)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(LaunchError, match="mixed_precision is 'fp4', which is not one of"):
        basic_config("fp4")

"""Every setting has one name, one place and one way to a file and back."""

from __future__ import annotations

from bigmodel.launch import LaunchConfig
from bigmodel.launch.options import options_of
from bigmodel.launch.settings import SECTIONS, all_options


def test_names_are_unique_over_all_sections() -> None:
    names = [name for cls in (LaunchConfig, *SECTIONS.values()) for name in options_of(cls)]
    assert len(names) == len(set(names)) == len(all_options())


def test_changes_reach_their_section_and_leave_the_original() -> None:
    config = LaunchConfig()
    changed = config.replace({"zero_stage": 2, "num_processes": 4})
    assert (changed.deepspeed_config.zero_stage, changed.num_processes) == (2, 4)
    assert (config.deepspeed_config.zero_stage, config.num_processes) == (None, None)
    assert changed.owner("fsdp_offload_params") is changed.fsdp_config
    assert changed.owner("num_processes") is changed


def test_a_file_holds_what_is_set() -> None:
    config = LaunchConfig(num_processes=2).replace({"zero_stage": 3})
    assert config.to_dict() == {
        "compute_environment": "LOCAL_MACHINE",
        "num_processes": 2,
        "deepspeed_config": {"zero_stage": 3},
    }

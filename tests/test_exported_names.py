"""The public names: a change here is a change of the interface."""

import pytest

import bigmodel


@pytest.mark.slow
def test_every_name_can_be_imported() -> None:
    names: dict[str, object] = {}
    exec("from bigmodel import *", names)
    assert all(names[name] is not None for name in bigmodel.__all__)


def test_rooms_are_no_public_names() -> None:
    assert "plan" not in bigmodel.__all__


def test_the_names_of_accelerate_for_big_models_are_there() -> None:
    assert set(bigmodel.__all__) >= {
        "Accelerator",
        "check_device_map",
        "compute_module_sizes",
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "find_executable_batch_size",
        "find_tied_parameters",
        "from_pretrained",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
        "release_memory",
        "save_model",
        "undispatch",
    }


def test_the_names_for_planning_are_there() -> None:
    names = {"Plan", "TrainingMemory", "make_plan", "plan_training", "profile_model", "training_memory"}
    assert set(bigmodel.__all__) >= names
    assert all(getattr(bigmodel, name) for name in names)


def test_the_names_of_accelerate_for_training_are_there() -> None:
    assert set(bigmodel.__all__) >= {
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
        "AcceleratorState",
        "BatchSamplerShard",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DataLoaderDispatcher",
        "DataLoaderShard",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedOperationException",
        "DistributedType",
        "DummyOptim",
        "DummyScheduler",
        "FullyShardedDataParallelPlugin",
        "GeneralTracker",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "GradientState",
        "InitProcessGroupKwargs",
        "IterableDatasetShard",
        "LocalSGD",
        "ParallelismConfig",
        "PartialState",
        "ProjectConfiguration",
        "SeedableRandomSampler",
        "SkipBatchSampler",
        "TorchTensorParallelConfig",
        "TorchTensorParallelPlugin",
        "debug_launcher",
        "gather_object",
        "get_logger",
        "merge_fsdp_weights",
        "notebook_launcher",
        "on_main_process",
        "register_tracker_class",
        "set_seed",
        "skip_first_batches",
        "write_basic_config",
    }

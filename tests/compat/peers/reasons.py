"""The tests of accelerate 1.15.0 that fail under the stand-in, by the reason why."""

REASONS = {
    "offloaded parameters are real tensors; the test expects them on meta": """
        test_hooks.py::test_align_devices_as_cpu_offload
        test_hooks.py::test_attach_align_device_hook_as_cpu_offload
        test_hooks.py::test_attach_align_device_hook_as_cpu_offload_with_weight_map
        test_modeling_utils.py::test_align_module_device_offloaded""",
    "device maps are this project's: later layers fill devices with room, split modules keep their own tensors": """
        test_modeling_utils.py::test_infer_auto_device_map
        test_modeling_utils.py::test_infer_auto_device_map_with_buffer_check_and_multi_devices
        test_modeling_utils.py::test_infer_auto_device_map_with_fallback_allocation
        test_modeling_utils.py::test_infer_auto_device_map_with_tied_weights""",
    "needs a configuration from the Hub, and accelerate's map: here its tied weights are together on accelerator 1": """
        test_modeling_utils.py::test_infer_auto_device_map_on_t0pp""",
    "at times one process takes the last number, and over gloo waits for the other, which found none and has ended": """
        scripts/test_notebook.py::test_fault_tolerant""",
    "bitsandbytes may be imported: whether forks can be trained in is tried, not told from what is imported": """
        scripts/test_notebook.py::test_problematic_imports""",
    "needs GPUs: it gives DistributedDataParallel device_ids": "scripts/test_ddp_comm_hook.py",
    "needs GPUs: it reads their peak memory": "scripts/external_deps/test_peak_memory_usage.py",
    "needs GPUs: its process group is of nccl": "scripts/external_deps/test_zero3_integration.py",
    "needs version 1 of FSDP, whose state dict has whole tensors": "scripts/test_merge_weights.py",
    "sequence parallelism is not supported": "scripts/external_deps/test_ds_alst_ulysses_sp.py",
    "asks how much memory the whole machine has free": """
        test_accelerator.py::test_free_memory_dereferences_prepared_components""",
}

REASON_OF = {test: reason for reason, tests in REASONS.items() for test in tests.split()}

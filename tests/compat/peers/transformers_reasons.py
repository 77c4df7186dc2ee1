"""The cases of transformers that fail under the stand-in, by the reason why."""

REASONS = {
    "plans count activations (62 KB beside the 80 KB of WhisperModel), for which the budget of the test, 40 to 72 KB, "
    "has no room: the model is on the host or on the other accelerator, where it fits": """
        test_modeling_whisper::WhisperModelTest::test_cpu_offload
        test_modeling_whisper::WhisperModelTest::test_model_parallelism
        test_modeling_whisper::WhisperStandaloneDecoderModelTest::test_cpu_offload
        test_modeling_whisper::WhisperStandaloneDecoderModelTest::test_model_parallelism""",
    "needs GPUs: it expects or chooses one for each process": """
        test_trainer_distributed_ddp::TestTrainerDistributedDDP::test_torchrun_accelerate_env_parity
        test_trainer_distributed_fsdp::TestTrainerDistributedFSDP::test_torchrun_accelerate_fsdp1_env_parity
        test_trainer_distributed_fsdp::TestTrainerDistributedFSDP::test_torchrun_accelerate_fsdp2_env_parity
        test_trainer_distributed_fsdp::TestTrainerDistributedFSDPCommon::test_fsdp2_generate
        test_trainer_distributed_fsdp::TestTrainerDistributedFSDPCommon::test_fsdp_generate""",
    "its script asks the Hub": """
        test_trainer_distributed_ddp::TestTrainerDistributedDDP::test_loss_averaging
        test_trainer_distributed_fsdp::TestTrainerDistributedFSDPCommon::test_cp_equivalence""",
}

REASON_OF = {case: reason for reason, cases in REASONS.items() for case in cases.split()}

BY_ERROR = {
    "https://huggingface.co": "asks the Hub",
    "self.dim() cannot be 0 to view Float as Byte": "DeepSpeed's own broadcast takes no parameter without dimensions",
    "No API key configured": "needs an account of wandb",
    "No module named 'run_translation'": "needs the examples of transformers' repository",
    "is not in the installed version of transformers": "is of an older version of transformers",
    "should be on CPU after FSDP move": "is of an older version of transformers, and fails under accelerate, too",
}
"""The reason of cases whose error has a text in it."""

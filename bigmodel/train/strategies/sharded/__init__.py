"""Models whose parameters are distributed tensors: FSDP2 and tensor parallelism."""

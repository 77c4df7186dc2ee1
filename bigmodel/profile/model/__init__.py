"""What a model consists of: tensors, units, experts, KV cache."""

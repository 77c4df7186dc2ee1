"""The parts of a model: tensors, units, experts, KV cache."""

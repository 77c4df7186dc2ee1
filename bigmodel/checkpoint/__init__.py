"""Checkpoint: safetensors on disk to tensors and back, in place."""

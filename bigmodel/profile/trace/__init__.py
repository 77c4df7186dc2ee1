"""What a forward does, recorded on fake tensors."""

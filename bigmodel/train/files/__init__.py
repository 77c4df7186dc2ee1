"""Files of training checkpoints."""

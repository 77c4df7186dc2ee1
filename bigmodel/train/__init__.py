"""Train: the Accelerator and everything it prepares."""

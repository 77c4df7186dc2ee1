"""The Accelerator."""

"""Mixed precision: autocast, fp8, and the scale of the loss in fp16."""

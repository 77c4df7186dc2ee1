"""LoRA adapters: read from their folders, and added to the rows of a step that ask for them."""

"""Hooks in accelerate's protocol: objects around a module's forward, one per module, as its ``_hf_hook``."""

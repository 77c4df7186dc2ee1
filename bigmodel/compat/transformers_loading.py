"""Loading of transformers' models by this project's plans."""

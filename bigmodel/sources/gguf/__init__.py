"""GGUF files, as llama.cpp writes them: read as a checkpoint of transformers.

From bottom to top: `types` (how elements are stored), `header` (one file: metadata and where its tensors lie), `names`
and `config` (transformers' names and config of each architecture), `model` (one model in one or several files),
`source` (as a source of models, with its tokenizer).
"""

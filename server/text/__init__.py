"""Text and tokens: the tokenizer, chat templates, incremental detokenization, stop strings."""

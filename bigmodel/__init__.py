"""bigmodel: run, serve and train models that do not fit their GPU."""

"""Loads the extension in a shell of IPython, as `%load_ext bigmodel.compat` in a notebook does."""

import json

from IPython.core.interactiveshell import InteractiveShell

InteractiveShell.instance().run_line_magic("load_ext", "bigmodel.compat")

import accelerate  # noqa: E402 (after the extension)

print(json.dumps(["version", accelerate.__version__]))

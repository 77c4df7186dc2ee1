"""``python -m bigmodel.commands.config``."""

from . import main

main()

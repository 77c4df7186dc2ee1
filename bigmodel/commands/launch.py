"""The names of ``accelerate.commands.launch``: starting scripts from a program, and ``python -m`` for the command."""

from bigmodel.compat.command_mains import command
from bigmodel.compat.commands import launch_command as launch_command
from bigmodel.compat.commands import launch_command_parser as launch_command_parser

main = command("launch")

if __name__ == "__main__":
    main()

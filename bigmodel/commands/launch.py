"""The names of ``accelerate.commands.launch``: starting scripts from a program."""

from bigmodel.compat.commands import launch_command as launch_command
from bigmodel.compat.commands import launch_command_parser as launch_command_parser

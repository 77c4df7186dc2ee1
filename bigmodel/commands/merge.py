"""The names of ``accelerate.commands.merge``: merging the weights of a sharded training checkpoint."""

from bigmodel.compat.command_mains import command
from bigmodel.compat.commands import merge_command as merge_command
from bigmodel.compat.commands import merge_command_parser as merge_command_parser

main = command("merge-weights")

if __name__ == "__main__":
    main()

"""The names of ``accelerate.commands.accelerate_cli``: all commands."""

from bigmodel.compat.command_mains import command

main = command()

if __name__ == "__main__":
    main()

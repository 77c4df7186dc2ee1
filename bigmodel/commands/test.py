"""The names of ``accelerate.commands.test``: the command `bigmodel test`."""

from bigmodel.compat.command_mains import command

main = command("test")

if __name__ == "__main__":
    main()

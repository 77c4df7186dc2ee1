"""The names of ``accelerate.commands.env``: the command `bigmodel env`."""

from bigmodel.compat.command_mains import command

main = command("env")

if __name__ == "__main__":
    main()

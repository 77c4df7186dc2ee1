"""The `bigmodel` command, one file per subcommand."""

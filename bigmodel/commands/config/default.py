"""The names of ``accelerate.commands.config.default``: a configuration file without questions."""

from bigmodel.launch.config_file import write_basic_config as write_basic_config

"""The names of ``accelerate.commands.config``: configuration files of launches."""

from bigmodel.compat.cluster_config import ClusterConfig as ClusterConfig
from bigmodel.compat.command_mains import command
from bigmodel.compat.commands import cache_dir as cache_dir
from bigmodel.compat.commands import default_config_file as default_config_file
from bigmodel.compat.commands import load_config_from_file as load_config_from_file

main = command("config")

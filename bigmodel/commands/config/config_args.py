"""The names of ``accelerate.commands.config.config_args``: where configuration files are, and what they hold."""

from pathlib import Path

from bigmodel.compat.cluster_config import ClusterConfig as ClusterConfig
from bigmodel.compat.commands import cache_dir as cache_dir
from bigmodel.compat.commands import default_config_file as default_config_file
from bigmodel.compat.commands import load_config_from_file as load_config_from_file
from bigmodel.compat.refused import SAGEMAKER, refused

BaseConfig = ClusterConfig
SageMakerConfig = refused("SageMakerConfig", SAGEMAKER)

hf_cache_home = str(Path(cache_dir).parent)
"""The folder that Hugging Face's libraries keep their files in."""
default_json_config_file = default_yaml_config_file = str(Path(cache_dir) / "default_config.yaml")
"""The file that is written if none is named; both names are accelerate's for it."""

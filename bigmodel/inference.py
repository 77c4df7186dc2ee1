"""The names of ``accelerate.inference``: one model over several processes."""

from bigmodel.compat.inference import prepare_pippy as prepare_pippy

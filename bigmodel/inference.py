"""The names of ``accelerate.inference``: one model over several processes."""

from bigmodel.compat.inference import prepare_pippy as prepare_pippy
from bigmodel.compat.pipelining import build_pipeline as build_pipeline
from bigmodel.compat.pipelining import find_pippy_batch_size as find_pippy_batch_size
from bigmodel.compat.pipelining import generate_device_map as generate_device_map
from bigmodel.compat.pipelining import pippy_forward as pippy_forward

"""The names of ``accelerate.utils.torch_xla``. TPUs are not supported: a call says so."""

from bigmodel.compat.refused import TPU, refused

install_xla = refused("install_xla", TPU)

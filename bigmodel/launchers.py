"""The names of ``accelerate.launchers``: a function on several processes."""

from bigmodel.launch import debug_launcher as debug_launcher
from bigmodel.launch import notebook_launcher as notebook_launcher

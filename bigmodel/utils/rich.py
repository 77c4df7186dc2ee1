"""Importing this module has the package rich print tracebacks, as importing ``accelerate.utils.rich`` does.

Raises:
    ModuleNotFoundError: rich is not installed.
"""

try:
    from rich.traceback import install
except ImportError:
    raise ModuleNotFoundError("this module needs the package rich: `pip install rich`") from None

install(show_locals=False)

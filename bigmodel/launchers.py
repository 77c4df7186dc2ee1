"""The names of ``accelerate.launchers``: a function on several processes."""

from bigmodel.launch import debug_launcher as debug_launcher
from bigmodel.launch import notebook_launcher as notebook_launcher


def test_launch() -> None:
    """Make this process's `PartialState`: that shows whether a launch works."""
    from bigmodel.train import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # for pytest, which takes it for a test

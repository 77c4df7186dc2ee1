"""A Ctrl-C at any moment: Python notices one at calls and returns, and each of these can be tried in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch


class Interrupt:
    """A Ctrl-C that comes at a call or return with a number, in the thread that calls `arm`.

    Args:
        number: How many calls and returns pass before.
        within: A part of the path of all files in whose functions it may come.

    Attributes:
        came: It has come.
    """

    def __init__(self, number: int, within: str = "") -> None:
        self._left = number
        self._within = within
        self._over = False
        self.came = False

    def arm(self) -> None:
        """Let it come from now on."""
        sys.setprofile(self._profile)

    def disarm(self) -> None:
        """Let it come no more, whatever thread it was to come in."""
        self._over = True

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self._over:
            sys.setprofile(None)
        elif event in ("call", "c_return") and self._within in frame.f_code.co_filename:
            self._left -= 1
            if self._left < 0:
                sys.setprofile(None)
                self.came = True
                raise KeyboardInterrupt


def interrupted_at(number: int, work: Callable[[], object], within: str = "") -> bool:
    """Do `work` with a Ctrl-C at one of its calls and returns; False past the last of them."""
    enabled = torch.is_grad_enabled()
    interrupt = Interrupt(number, within)
    interrupt.arm()
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        torch.set_grad_enabled(enabled)  # torch's own no_grad() does not survive one in its exit
    return interrupt.came

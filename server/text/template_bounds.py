"""Bounds on what one operation of a chat template makes: templates are programs, and come with checkpoints.

A product or a power is computed at once: it cannot be stopped, and takes memory and time from everything else. What
filters and methods of texts make (`replace`, `join`, `format`) is not bounded.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

T = TypeVar("T", bound=Sized)

ITEMS = 1 << 24
"""Most characters or items of a product or sum, and the largest number that a method of a text is given: a width."""

BITS = 1 << 16
"""Most bits of a number."""


class _BoundedCode(CodeGenerator):
    """Has the environment check what `~` makes: it is none of the operators that an environment may intercept."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.checked(")
        super().visit_Concat(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's environment for templates of others, with bounds on operators, and on widths."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return what an operator makes. Raises SecurityError where that is too large."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(1, right) if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits, BITS)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check(len(left) + len(right), ITEMS)
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(times, int):
                    _check(len(items) * times, ITEMS)
        return super().call_binop(context, operator, left, right)

    def checked(self, joined: T) -> T:
        """Return a text that is joined of others. Raises SecurityError where it is too large, before it grows again."""
        _check(len(joined), ITEMS)
        return joined

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns. Raises SecurityError for too large a width."""
        if isinstance(getattr(__obj, "__self__", None), str):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    _check(value, ITEMS)
        return super().call(__context, __obj, *args, **kwargs)


def bound_templates() -> None:
    """Have the chat templates of transformers compiled with these bounds from now on, in this process."""
    templates: Any = chat_template_utils
    templates.ImmutableSandboxedEnvironment = BoundedEnvironment


def _check(size: int, most: int) -> None:
    if size > most:
        raise SecurityError(f"an operation makes too much: at most {most} items, characters or bits")

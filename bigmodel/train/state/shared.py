"""States of which every instance shares one dict: an unpickled instance is another view of the state of its process."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="SharedState")


class SharedState:
    """Pickles to an instance that shares the state of the process that unpickles it.

    Where that process has no state, it takes over the pickled one.
    """

    _shared_state: ClassVar[dict[str, Any]]

    def _picklable_state(self) -> dict[str, Any]:
        """Return the state without what belongs to this process alone."""
        return dict(self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared_instance, (type(self), self._picklable_state())


def _shared_instance(cls: type[S], state: dict[str, Any]) -> S:
    instance = cls.__new__(cls)
    instance.__dict__ = cls._shared_state
    if not cls._shared_state:
        cls._shared_state.update(state)
    return instance

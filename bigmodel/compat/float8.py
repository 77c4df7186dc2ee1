"""8-bit training with torchao: which layers are converted, and converting them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


def torchao_required(func: F) -> F:
    """Decorate a function to raise ImportError when it is called and torchao is not installed."""

    @wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if find_spec("torchao") is None:
            raise ImportError(f"{func.__name__} needs the package torchao: `pip install torchao`")
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer; None and None if there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Whether a layer is converted: it is not among `layers_to_filter`, and both its sizes are multiples of 16."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """`filter_linear_layers` for all but the first and the last linear layer of `module`, which train unstably."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` is one of torchao with 8 bits.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Replace linear layers of `model` by those of torchao that compute with 8 bits.

    Args:
        config: A `Float8LinearConfig` of torchao.
        module_filter_func: Says by module and name which are replaced; by default all but the first and the last that
            have sizes that are multiples of 16.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.float8 import convert_to_float8_training

    chosen = module_filter_func or partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)

"""A head that predicts a further token (MTP), as a model of one layer that borrows embedding and output layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class MtpInput(nn.Module):
    """The head's input: a projection of the embedding of a token, and of the model's state before it.

    Args:
        width: elements of a state.
        norm: the model's norm: its class and its epsilon are those of both norms.
        dtype: dtype of the parameters.

    Attributes:
        embedding: the model's own, which is not a part of this module; None: embeddings are zeros, as in a dry run.
    """

    def __init__(self, width: int, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        kind: Any = type(norm)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))
        self.enorm = kind(width, eps=epsilon)
        self.hnorm = kind(width, eps=epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.width = width
        self.to(dtype)
        self.__dict__["embedding"] = self.__dict__["device"] = self.__dict__["states"] = None

    @contextmanager
    def after(self, states: torch.Tensor) -> Iterator[None]:
        """Within this context, forwards are of tokens behind these states [tokens, width]."""
        self.__dict__["states"] = states
        try:
            yield
        finally:
            self.__dict__["states"] = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the layer's input [sequences, tokens, width]."""
        like: torch.Tensor = self.hnorm.weight
        shape = (*input_ids.shape, self.width)
        states = self.__dict__["states"]
        states = like.new_zeros(shape) if states is None else states.to(like.device, like.dtype).view(shape)
        embedding = self.__dict__["embedding"]
        if embedding is None:
            embedded = like.new_zeros(shape)
        else:
            embedded = embedding(input_ids.to(self.__dict__["device"])).to(like.device, like.dtype)
        projected: torch.Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], dim=-1))
        return projected


class SharedHead(nn.Module):
    """The model's output layer behind the head.

    Attributes:
        output: the model's own, which is not a part of this module; None: logits have no values, as in a dry run.
        given: the states that it was given last: those before the tokens after next.
        idle: no logits are wanted: it returns none.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.idle = False
        self.given: torch.Tensor | None = None
        self.__dict__["output"] = self.__dict__["device"] = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [sequences, tokens, vocabulary]."""
        self.given = states
        output = self.__dict__["output"]
        if self.idle:
            return states[..., :1]
        if output is None:
            return states.new_empty((*states.shape[:-1], self.vocabulary))
        logits: torch.Tensor = output(states.to(self.__dict__["device"]))
        return logits


def as_head(model: Any) -> Any:
    """Return a model of one layer as a head: its embedding and output layer become :class:`MtpInput` and
    :class:`SharedHead`.

    Args:
        model: a causal language model of transformers, on meta, which is changed.
    """
    config = model.config.get_text_config()
    dtype = model.lm_head.weight.dtype
    model.model.embed_tokens = MtpInput(config.hidden_size, model.model.norm, dtype)
    model.lm_head = SharedHead(config.vocab_size)
    return model


def borrow(head: Any, model: Any, device: torch.device) -> None:
    """Let a head use a model's embedding and output layer.

    Args:
        head: the head.
        model: the model.
        device: the model's main device, from which its parts bring their inputs to where they run.
    """
    head.model.embed_tokens.__dict__.update(embedding=model.get_input_embeddings(), device=device)
    head.lm_head.__dict__.update(output=model.get_output_embeddings(), device=device)


def is_head(model: Any) -> bool:
    """Whether a model is a head of another one."""
    return isinstance(getattr(model, "lm_head", None), SharedHead)

"""Prompts with images or sounds: a placeholder token stands for each of their features."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .image_states import mask_of_images
from .inputs import MASK, fields, first_field, token_ids
from .session import Session
from .values import real_tensors

PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Config fields that name the placeholder token of each kind of media."""

KINDS = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
"""Inputs that say of each token whether it is a placeholder."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with images or sounds.

    Attributes:
        ids: token ids, with a placeholder for each feature of an image or sound.
        media: the other inputs, as fake tensors.
        mask: the caller's mask, on the host, if it leaves tokens out: these are padding.
        plain: a token of the last sequence that may be padding: forwards count the placeholders of each image, and
            take images without a token between them for one.
    """

    ids: torch.Tensor
    media: Mapping[str, torch.Tensor]
    mask: torch.Tensor | None = None
    plain: int = 0

    @classmethod
    def with_media(cls, session: Session, config: Any, media: Mapping[str, torch.Tensor], length: int) -> Prompt:
        """Return a prompt with a placeholder for each feature of `media`.

        Args:
            session: the fake model.
            config: its config.
            media: images or sounds. Token ids among them are taken as they are, or, on meta, as a length; so is a mask
                of theirs.
            length: tokens of each sequence; more if the placeholders need them.
        """
        batch_size = session.sequences
        ids = media.get("input_ids")
        others = {name: value for name, value in media.items() if name not in ("input_ids", MASK)}
        fake = session.fake(others, session.dtype)
        if ids is not None and ids.device.type != "meta":
            with real_tensors():
                return cls(ids.detach().cpu(), fake, _leaving_out(media.get(MASK)), _first_plain(media))
        length = length if ids is None else ids.shape[1]
        placeholder, count = _placeholders(session, config, fake)
        with real_tensors():
            ids = token_ids(config, batch_size, max(length, count + 2))
            kinds = torch.zeros_like(ids)
            kinds[:, 1 : 1 + count] = 1
            if placeholder is not None:
                ids[:, 1 : 1 + count] = placeholder
        kinds_name = next(filter(session.accepts, KINDS), None)
        if count and kinds_name is not None:
            fake = {**fake, kinds_name: session.fake(kinds)}
        return cls(ids, {**fake, **mask_of_images(session, fake, ids.shape[1])})


def _first_plain(media: Mapping[str, torch.Tensor]) -> int:
    """Return the place of the first token of the last sequence that is neither a placeholder nor alone between two
    images; 0 where that is not known."""
    kinds = next((media[name] for name in KINDS if name in media), None)
    if kinds is None or kinds.device.type == "meta" or kinds.dim() != 2:
        return 0
    plain = [True, *(kinds[-1] == 0).tolist(), True]
    return next((at for at in range(len(plain) - 2) if plain[at + 1] and (plain[at] or plain[at + 2])), 0)


def _leaving_out(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask of tokens on the host, int64; None if its values are not known or if it leaves none out."""
    if mask is None or mask.device.type == "meta" or bool(mask.all()):
        return None
    return mask.detach().cpu().long()


def _placeholders(session: Session, config: Any, media: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the token that stands for a feature (None if the config names none), and how many a sequence has."""
    if session.accepts("image_embeds_position_mask"):
        return None, first_field(config, 64, "latent_query_num")
    for kind, names in PLACEHOLDERS.items():
        placeholder = next(iter(fields(config, *names)), None)
        encode = _encoder(session.model, f"get_{kind}_features")
        taken = {} if encode is None else inspect.signature(encode).parameters
        if encode is not None and placeholder is not None and set(media) & set(taken):
            found = encode(**{name: value for name, value in media.items() if name in taken})
            return placeholder, sum(each.shape[:-1].numel() for each in _features(found)) // session.sequences
    return None, 0


def _encoder(model: nn.Module, method: str) -> Callable[..., Any] | None:
    """Return the method that computes features: that of the model within the head, which names all of its inputs, else
    that of the model itself; None if there is none."""
    owners = (getattr(model, "model", None), model)
    return next((getattr(owner, method) for owner in owners if hasattr(owner, method)), None)


def _features(found: Any) -> list[torch.Tensor]:
    """Return the feature tensors in the output of `get_image_features` or its like."""
    if hasattr(found, "pooler_output"):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]

"""Features of images that a forward returns, and that `generate` gives to each further step in the place of the images.

A mask beside them says which images each token of the text sees (Idefics).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .values import real_tensors

if TYPE_CHECKING:
    from .session import Session

SEEN = "image_attention_mask"
"""Argument of a forward that says which images each token sees: int64, (batch, tokens, images)."""

RESAMPLED, ENCODED = "perceiver_embeddings", "image_encoder_embeddings"
"""Arguments that take the returned features: of a resampler behind the image encoder, or of the encoder alone."""


def mask_of_images(session: Session, media: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Return the mask by which each token of a prompt sees every image in `media`, as a fake tensor by name.

    Empty for models whose steps take no features of images: others have another argument of the same name.

    Args:
        session: the fake model.
        media: its other inputs; images are (batch, images, channels, height, width).
        tokens: length of the prompt.
    """
    images = media.get("pixel_values")
    if images is None or images.dim() != 5 or SEEN in media or not _takes_states(session):
        return {}
    with real_tensors():
        mask = torch.ones(images.shape[0], tokens, images.shape[1], dtype=torch.long)
    return {SEEN: session.fake(mask)}


def image_states_in(session: Session, output: Any) -> torch.Tensor | None:
    """Return the features in the output of a forward that the next step takes; None if it takes none."""
    return getattr(output, "image_hidden_states", None) if _takes_states(session) else None


def inputs_of_step(
    session: Session, media: Mapping[str, Any], states: torch.Tensor | None, tokens: int
) -> dict[str, torch.Tensor]:
    """Return what a step of `tokens` tokens takes in the place of images, by name; nothing without `states`.

    Args:
        session: the fake model.
        media: inputs of the prompt beside its text.
        states: what `image_states_in` returned for the forward before.
        tokens: tokens that the step reads; each sees what the last one of the prompt does.
    """
    if states is None:
        return {}
    config: Any = session.model.config
    name = RESAMPLED if getattr(config, "use_resampler", False) else ENCODED
    mask = {SEEN: media[SEEN][:, -1:].expand(-1, tokens, -1)} if SEEN in media else {}
    return {name: states, **mask}


def _takes_states(session: Session) -> bool:
    return session.accepts(SEEN) and session.accepts(ENCODED)

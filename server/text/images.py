"""Images of prompts: from the base64 of a client to what the model's forward takes, within bounds.

An image is decoded only if its header names a format and a size that are accepted. What the model's processor makes of
all images of a prompt may take no more than what memory was planned for.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigmodel.devices.default_dtype import computing_beside_builds
from bigmodel.errors import ServeError

FORMATS = ("JPEG", "PNG", "WEBP")
"""Formats of images, by their names in Pillow."""

MAX_IMAGES = 4
"""Most images of a prompt, where the context has room for as many."""

MAX_PIXELS = 16 << 20
"""Most pixels of all images of a prompt together, as they are decoded."""

PLANNED_EDGE = 1024
"""Edge of the square images that memory is planned for, in pixels."""

_DATA_URL = re.compile(r"data:image/(?:jpeg|png|webp);base64,")


class ImageError(ServeError, ValueError):
    """An image of a client is not accepted."""


@dataclass(frozen=True)
class ImageSupport:
    """What turns images of prompts into arguments of the model's forward.

    Args:
        processor: Transformers' processor of the model, with a tokenizer and an image processor.
        most: Images of a prompt that memory was planned for.
        elements: Elements of each argument with that many images, by name.
        tokens: Tokens of the longest prompt with images that memory was planned for.
    """

    processor: Any
    most: int
    elements: Mapping[str, int]
    tokens: int

    def check_number(self, images: int) -> None:
        """Raise ImageError for more images than a prompt may have."""
        if images > self.most:
            raise ImageError(f"the conversation has {images} images; at most {self.most} are accepted")

    def process(
        self, text: str, given: Sequence[str | bytes], *, special: bool
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return the tokens of a rendered conversation, and the other arguments of the forward.

        Args:
            text: With a placeholder for each image, as the chat template writes it.
            given: The images, as data URLs, or as they were fetched.
            special: Whether the tokenizer adds its special tokens.

        Raises:
            ImageError: An image is damaged, too large, of another format, or one too many.
        """
        self.check_number(len(given))
        images, left = [], MAX_PIXELS
        for number, image in enumerate(given):
            try:
                images.append(decode(content_of(image) if isinstance(image, str) else image, left))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from error
            left -= images[-1].width * images[-1].height
        try:
            with computing_beside_builds():
                made = self.processor(text=text, images=images, return_tensors="pt", add_special_tokens=special)
        except Exception as error:  # it is written for images that a user chose, and may raise anything
            raise ImageError(f"the model's processor refused the images: {type(error).__name__}") from error
        ids, media = split(made)
        for name, value in media.items():
            planned = self.elements.get(name, 0)
            if value.is_floating_point() and value.numel() > planned:
                raise ImageError(
                    f"the images have {value.numel()} values, but memory is planned for {planned}; "
                    "send smaller ones, or fewer"
                )
        if len(ids) > self.tokens:
            raise ImageError(f"the prompt has {len(ids)} tokens with its images; at most {self.tokens} fit")
        return ids, media


def content_of(url: str) -> bytes:
    """Return the bytes of a data URL.

    Args:
        url: ``data:image/png;base64,...``, or of JPEG or WebP.

    Raises:
        ImageError: It is another URL, or not base64.
    """
    begin = _DATA_URL.match(url)
    if begin is None:
        if url.startswith("data:"):
            raise ImageError("must be 'data:image/png;base64,...', or of JPEG or WebP")
        raise ImageError("URLs are not fetched; send the image itself, as 'data:image/png;base64,...'")
    try:
        return base64.b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError("is not valid base64") from error


def decode(content: bytes, pixels: int) -> Any:
    """Return the RGB image of a file.

    Args:
        content: Of the file: PNG, JPEG or WebP.
        pixels: Most pixels that it may have.

    Raises:
        ImageError: It is damaged, of another format, or too large.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > pixels:
                raise ImageError(
                    f"has {image.width} x {image.height} pixels; all images of a conversation together may have "
                    f"{MAX_PIXELS}"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # decoders of damaged data may raise anything
        raise ImageError("is damaged, or no image of JPEG, PNG or WebP") from error


def split(made: Mapping[str, Any]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the tokens of what a processor made of one prompt, and the other arguments but the mask."""
    ids: list[int] = made["input_ids"][0].tolist()
    others = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
    return ids, others


def largest_prompt(processor: Any, tokens: int) -> tuple[dict[str, torch.Tensor], ImageSupport]:
    """Return the arguments of the largest forward of a prompt with images, and the support that bounds prompts by it.

    Args:
        processor: Of the model.
        tokens: Tokens of the prompt, images included.

    Raises:
        ServeError: Not even one image fits so many tokens.
    """
    from PIL import Image

    square = Image.new("RGB", (PLANNED_EDGE, PLANNED_EDGE))
    placeholder = processor.image_token
    for most in range(MAX_IMAGES, 0, -1):
        # Apart, as in chats: some models take placeholders side by side for those of one image.
        made = processor(text=" ".join([placeholder] * most), images=[square] * most, return_tensors="pt")
        missing = tokens - made["input_ids"].shape[1]
        if missing < 0:
            continue
        media = split(made)[1]
        filler = torch.full((1, missing), _plain_token(processor))
        arguments = {"input_ids": torch.cat([made["input_ids"], filler], 1)}
        for name, value in media.items():  # one entry for each token
            longer = value.dim() == 2 and value.shape == made["input_ids"].shape and not value.is_floating_point()
            arguments[name] = torch.cat([value, value.new_zeros(1, missing)], 1) if longer else value
        elements = {name: value.numel() for name, value in media.items()}
        return arguments, ImageSupport(processor, most, elements, tokens)
    raise ServeError(f"an image takes more than the {tokens} tokens that memory is planned for; see --max-model-len")


def _plain_token(processor: Any) -> int:
    """A token that stands for no image."""
    tokenizer = processor.tokenizer
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids(processor.image_token)}
    return next(token for token in range(len(tokenizer)) if token not in special)

"""A tiny random LLaVA and its processor, made in memory."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken

from tests.server.tiny import fresh_tokenizer

IMAGE = "<image>"
EDGE, PATCH = 16, 4
TOKENS = (EDGE // PATCH) ** 2
"""Tokens of an image."""


@lru_cache(maxsize=1)
def processor() -> Any:
    """The processor that tests share: a byte-level tokenizer, and images of 16 x 16 pixels."""
    tokenizer = fresh_tokenizer()
    tokenizer.add_tokens(AddedToken(IMAGE, special=True, normalized=False))
    tokenizer.chat_template = None
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": EDGE}, crop_size={"height": EDGE, "width": EDGE})
    return transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


@lru_cache(maxsize=1)
def loaded_processor() -> Any:
    """The same as transformers loads it: where torchvision is installed, it resizes images with other rounding."""
    with tempfile.TemporaryDirectory() as folder:
        processor().save_pretrained(folder)
        return transformers.AutoProcessor.from_pretrained(folder)


def tiny_llava(seed: int = 0) -> Any:
    """A LLaVA whose choices are not all alike."""
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = len(processor().tokenizer)
    text = transformers.LlamaConfig(
        **width, vocab_size=tokens, max_position_embeddings=512, bos_token_id=None, eos_token_id=None
    )
    vision = transformers.CLIPVisionConfig(**width, image_size=EDGE, patch_size=PATCH)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=processor().tokenizer.convert_tokens_to_ids(IMAGE)
    )
    torch.manual_seed(seed)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    model.generation_config.eos_token_id = None
    return model


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """An image of random pixels."""
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def generated(model: Any, inputs: Any, tokens: int) -> list[int]:
    """What transformers' own generate adds to a prompt, greedily."""
    found = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]

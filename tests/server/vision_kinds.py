"""Tiny random models of several kinds that see, and their processors, made in memory without torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.server import vision
from tests.server.tiny import EOS, fresh_tokenizer

WIDTH: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = {
    **WIDTH,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EDGE, PATCH = 16, 4
GRIDS: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
DEPTH: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": 2}


@dataclass(frozen=True)
class VisionKind:
    """A kind of model that sees.

    Attributes:
        name: Of the kind.
        image: What stands for an image in a text.
        processor: Makes its processor.
        config: Makes the config of the model, whose tokens are those of a tokenizer.
    """

    name: str
    image: str
    processor: Callable[[], Any]
    config: Callable[[Any], Any]

    def __repr__(self) -> str:
        return self.name


def without_videos(processor: type[Any]) -> type[Any]:
    """The class of processors of images and videos, for images alone: those of videos need torchvision."""

    class OfImages(processor):  # type: ignore[misc]
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            processor.__init__(self, image_processor, tokenizer, chat_template=chat_template)

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Without torchvision the check itself fails, as a mapping of its classes is a placeholder."""

    return OfImages


def tokenizer_with(**special: str) -> Any:
    """The tests' tokenizer with more special tokens, by their names as its attributes."""
    plain = fresh_tokenizer()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, eos_token=EOS, extra_special_tokens=special
    )


def with_pads() -> Any:
    """The tokenizer of Qwen's models."""
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    texts = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return tokenizer_with(**dict(zip(names, texts, strict=True)))


def of_grids(processor: type[Any]) -> Callable[[], Any]:
    """What makes a processor of images whose sizes differ."""

    def made() -> Any:
        size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
        return without_videos(processor)(transformers.Qwen2VLImageProcessorPil(size=size, **GRIDS), with_pads())

    return made


def gemma3_processor() -> Any:
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    images = transformers.Gemma3ImageProcessorPil(size={"height": EDGE, "width": EDGE})
    return transformers.Gemma3Processor(images, tokenizer_with(**tokens), image_seq_length=4)


def idefics3_processor() -> Any:
    """Its images are a tile, or several and the whole."""
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * EDGE}, max_image_size={"longest_edge": EDGE}
    )
    return transformers.Idefics3Processor(images, tokenizer_with(image_token="<image>"), image_seq_len=4)


def _pads(tokenizer: Any) -> dict[str, int]:
    return {
        "image_token_id": tokenizer.image_token_id,
        "video_token_id": tokenizer.video_token_id,
        "vision_start_token_id": tokenizer.vision_start_token_id,
        "vision_end_token_id": tokenizer.vision_end_token_id,
    }


def _turned(sections: list[int], **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **others}}


def qwen2_vl(tokenizer: Any) -> Any:
    vision = {**DEPTH, "embed_dim": 32, "hidden_size": 32}
    text = {**TEXT, "vocab_size": len(tokenizer), **_turned([1, 1, 2])}
    return transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **_pads(tokenizer))


def qwen2_5_vl(tokenizer: Any) -> Any:
    """Its images are attended to in windows, but for the last layer."""
    vision = {**DEPTH, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16}
    text = {**TEXT, "vocab_size": len(tokenizer), **_turned([1, 1, 2])}
    return transformers.Qwen2_5_VLConfig(
        vision_config={**vision, "fullatt_block_indexes": [1]}, text_config=text, **_pads(tokenizer)
    )


def _vision3() -> dict[str, Any]:
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
    return {**DEPTH, **sizes}


def qwen3_vl(tokenizer: Any) -> Any:
    """Features of an image are added in several layers of the text's model."""
    text = {**TEXT, "vocab_size": len(tokenizer), "head_dim": 8, **_turned([2, 1, 1], mrope_interleaved=True)}
    vision = {**_vision3(), "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(vision_config=vision, text_config=text, **_pads(tokenizer))


def qwen3_5(tokenizer: Any) -> Any:
    """Linear attention in one layer of two."""
    linear = {f"linear_{what}_head_dim": 8 for what in ("key", "value")}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
    turned = _turned([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=1.0)
    types = {"layer_types": ["linear_attention", "full_attention"]}
    text = {**TEXT, "vocab_size": len(tokenizer), **linear, **heads, **types, **turned}
    return transformers.Qwen3_5Config(vision_config=_vision3(), text_config=text, **_pads(tokenizer))


def gemma3(tokenizer: Any) -> Any:
    """The tokens of an image attend to each other both ways; a sliding window in one layer of two."""
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 8}
    return transformers.Gemma3Config(
        text_config={**TEXT, **types, "vocab_size": len(tokenizer)},
        vision_config={**WIDTH, "image_size": EDGE, "patch_size": PATCH},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )


def tiled(config: type[Any], tokenizer: Any) -> Any:
    return config(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**WIDTH, "image_size": EDGE, "patch_size": PATCH},
        image_token_id=tokenizer.image_token_id,
        scale_factor=2,
    )


def idefics3(tokenizer: Any) -> Any:
    return tiled(transformers.Idefics3Config, tokenizer)


def smolvlm(tokenizer: Any) -> Any:
    return tiled(transformers.SmolVLMConfig, tokenizer)


PADDED = "<|vision_start|><|image_pad|><|vision_end|>"
KINDS = (
    VisionKind("qwen2_5_vl", PADDED, of_grids(Qwen2VLProcessor), qwen2_5_vl),
    VisionKind("gemma3", "<start_of_image>", gemma3_processor, gemma3),
    VisionKind("idefics3", "<image>", idefics3_processor, idefics3),
    VisionKind("qwen3_5", PADDED, of_grids(Qwen3VLProcessor), qwen3_5),
    VisionKind("qwen2_vl", PADDED, of_grids(Qwen2VLProcessor), qwen2_vl),
    VisionKind("qwen3_vl", PADDED, of_grids(Qwen3VLProcessor), qwen3_vl),
    VisionKind("smolvlm", "<image>", idefics3_processor, smolvlm),
)
"""The most telling first."""


def built(kind: VisionKind, tokenizer: Any, seed: int = 0) -> Any:
    """The model of a kind, whose choices are not all alike."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(kind.config(tokenizer)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
            if name.endswith("mm_input_projection_weight"):
                torch.nn.init.normal_(parameter)  # of zeros: no image would change a token
    model.generation_config.eos_token_id = None
    return model


def with_template(kind: VisionKind) -> Any:
    """The processor of a kind, which writes chats as those of the tests' LLaVA are."""
    made = kind.processor()
    made.chat_template = vision.processor().chat_template.replace(vision.IMAGE, kind.image)
    made.tokenizer.chat_template = None
    return made

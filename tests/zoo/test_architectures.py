"""The dry run of every architecture that transformers exports, with its default config: memory is known for each.

The list grows by itself. Exceptions are named with their reasons; whatever else is not known is a defect.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bigmodel.profile import profile_model
from bigmodel.profile.trace.workload import max_context

LAYERS = 6
CONTEXT = 64

QUICK = {"gpt2", "llama", "vit"}
"""Architectures that every run of the tests tries."""

LONG = {"bert", "clip", "mamba2", "mistral", "siglip", "t5", "wav2vec2", "whisper", "xlm-roberta"}
"""Architectures that `make long` tries, too; the others are tried by `make zoo`."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.slow, pytest.mark.long if name in LONG else pytest.mark.zoo]


INCONSISTENT = "its default config is not one that its forward accepts"
DATA = "the shapes of its forward depend on what its weights compute"
OTHER_INPUTS = "its inputs follow no convention: sample_inputs are needed"
NO_FORWARD = "a model of several that has no forward of its own, or one that takes a session"
RAISES = (
    "transformers' own forward of it raises with a cache, as its config has no num_hidden_layers; without one, its "
    "patches are as long as its weights compute"
)

EXCEPTIONS = {
    **dict.fromkeys(
        [
            "bamba", "blenderbot", "blip-2", "deepseek_v2", "glm46v", "glm4v", "glm4v_moe",
            "glm4v_moe_text", "glm4v_text", "glm_image", "glm_image_text", "glmga", "granitemoehybrid", "hrm_text",
            "instructblip", "instructblipvideo", "lw_detr", "pp_ocrv6_small_det", "qwen3_omni_moe_thinker", "step3p7",
            "uvdoc", "xmod",
        ],
        INCONSISTENT,
    ),
    "blt": RAISES,
    **dict.fromkeys(["fastspeech2_conformer", "fastspeech2_conformer_with_hifigan", "vits"], DATA),
    **dict.fromkeys(
        ["bark", "edgetam_video", "sam2_video", "sam3_tracker_video", "sam3_video"], NO_FORWARD
    ),
    **dict.fromkeys(
        [
            "glm_image_vqmodel", "inkling2_vision", "kyutai_speech_to_text", "speech-encoder-decoder", "tvp",
            "voxtral_realtime",
        ],
        OTHER_INPUTS,
    ),
}  # fmt: skip
"""Architectures whose memory is not known without sample inputs, and why."""


def architectures() -> dict[str, str]:
    """Return the class that stands for each architecture: the one that generates, else the bare model."""
    found: dict[str, Any] = {}
    for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT"):
        for name, chosen in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(name, chosen)
    for name, chosen in modeling_auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(name, chosen)
    return {name: chosen if isinstance(chosen, str) else chosen[0] for name, chosen in sorted(found.items())}


def shallow(config: Any) -> Any:
    """Return a config with fewer layers, if all of its layers are of one kind."""
    depth = getattr(config, "num_hidden_layers", None)
    lists = [value for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) == depth]
    if isinstance(depth, int) and depth > LAYERS and not lists:
        config.num_hidden_layers = LAYERS
    return config


def build(name: str, class_name: str) -> Any:
    """Return a model with its default config on meta; skip the test if there is none."""
    try:
        config = shallow(CONFIG_MAPPING[name]())
        with torch.device("meta"):
            return getattr(transformers, class_name)._from_config(config)
    except Exception as error:  # a config of several that must be named, or a package that is not installed
        pytest.skip(f"has no default model: {error}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        pytest.param(name, class_name, id=name, marks=marks_of(name))
        for name, class_name in architectures().items()
        if name not in EXCEPTIONS
    ],
)
def test_memory_is_known_for_every_architecture(name: str, class_name: str) -> None:
    model = build(name, class_name)
    profile = profile_model(model, context_length=min(CONTEXT, max_context(model) or CONTEXT))
    assert profile.phases
    assert profile.activations > 0


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="some are newer than this transformers")
def test_every_exception_is_an_architecture() -> None:
    assert set(architectures()) >= set(EXCEPTIONS)

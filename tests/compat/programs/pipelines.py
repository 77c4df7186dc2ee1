"""Runs a small pipeline of diffusers under its two ways of offloading, and changes between them."""

import json

import torch

import bigmodel.compat
from bigmodel.devices import virtual

bigmodel.compat.install()
virtual.enable(count=1)
torch.set_num_threads(1)

from diffusers import (  # noqa: E402 (after installing)
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
)


def say(question: str, answer: object) -> None:
    print("\n" + json.dumps([question, answer]), flush=True)


def pipeline() -> DiTPipeline:
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=1000, norm_type="ada_norm_zero", norm_elementwise_affine=False,
    )  # fmt: skip
    decoder = AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip
    made = DiTPipeline(transformer.eval(), decoder.eval(), DDIMScheduler())
    made.set_progress_bar_config(disable=True)
    return made


def image(made: DiTPipeline) -> torch.Tensor:
    output = made([1], generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np")
    return torch.from_numpy(output.images)


expected = image(pipeline())


def same(made: DiTPipeline) -> bool:
    return bool(torch.allclose(image(made), expected, atol=1e-5))


made = pipeline()
made.enable_model_cpu_offload(device="virtual:0")
say("whole models", [same(made), same(made)])
say("execution device", str(made._execution_device))
say("after the pipeline", sorted({p.device.type for part in (made.transformer, made.vae) for p in part.parameters()}))
made.enable_sequential_cpu_offload(device="virtual:0")
say("block by block", [same(made), same(made)])
say("weights are real", not any(parameter.is_meta for parameter in made.transformer.parameters()))
made.enable_model_cpu_offload(device="virtual:0")
say("changed back", same(made))
made.remove_all_hooks()
say("without hooks", same(made.to("cpu")))

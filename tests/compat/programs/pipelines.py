"""Runs a small pipeline of diffusers offloaded in its three ways, twice each, and changes between them."""

import json
import tempfile

import torch

import bigmodel.compat
from bigmodel.devices import virtual

bigmodel.compat.install()
virtual.enable(count=2)
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


def devices(made: DiTPipeline) -> dict[str, list[str]]:
    parts = {"transformer": made.transformer, "vae": made.vae}
    return {name: sorted({str(p.device) for p in part.parameters()}) for name, part in parts.items()}


made = pipeline()
made.enable_model_cpu_offload(device="virtual:0")
say("whole models", [same(made), same(made)])
say("execution device", str(made._execution_device))
say("after the pipeline", devices(made))
made.enable_sequential_cpu_offload(device="virtual:0")
say("block by block", [same(made), same(made)])
say("weights are real", not any(parameter.is_meta for parameter in made.transformer.parameters()))
made.enable_model_cpu_offload(device="virtual:0")
say("changed back", same(made))
made.remove_all_hooks()
say("without hooks", same(made.to("cpu")))

with tempfile.TemporaryDirectory() as folder:
    pipeline().save_pretrained(folder)

    def load(*budgets: int) -> DiTPipeline:
        made = DiTPipeline.from_pretrained(folder, device_map="balanced", max_memory=dict(enumerate(budgets)))
        made.set_progress_bar_config(disable=True)
        return made

    made = load(10_000_000, 9_000_000)
    say("balanced", [made.hf_device_map, devices(made), same(made), same(made)])
    made.reset_device_map()
    say("reset", devices(made))
    made.enable_sequential_cpu_offload(device="virtual:1")
    say("balanced, then block by block", same(made))
    made = load(sum(p.nbytes for p in made.vae.parameters()))
    say("balanced over one device and the host", [made.hf_device_map, devices(made), same(made), same(made)])
    made.reset_device_map()
    made.enable_model_cpu_offload(device="virtual:0")
    say("balanced, then whole models", same(made))

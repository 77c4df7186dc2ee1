"""The main job from start to end, offline: train, save, plan, load, dispatch, generate, serve.

    python -m examples.demo

On a machine without an accelerator a virtual one stands in, so that streaming, budgets and memory are real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import bigmodel
from bigmodel.devices import accelerators, format_size, max_memory_allocated, reset_peak_memory

from .small_model import Text, build_model, perplexity, read_text, train, train_tokenizer

CONTEXT = 128
PROMPT = "Return a new list"
console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def main() -> None:
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="bigmodel-demo-"))
    try:
        run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(f"\ndone in {time.perf_counter() - started:.0f} s")


def run(folder: Path) -> None:
    """Do the whole job with `folder` for the checkpoint."""
    step("1. Train a small Llama on the docstrings of the standard library")
    text = read_text()
    tokenizer = train_tokenizer(text.training)
    model = train_and_save(text, tokenizer, folder)
    weights = sum(p.nbytes for p in model.parameters())
    del model

    step("2. Plan it under budgets too small for it, load it in place, dispatch it")
    budgets = small_budgets(weights)
    placed = load(folder, budgets)

    step("3. Generate")
    generate(placed, tokenizer)
    report_memory(placed)
    del placed

    step("4. Serve it over HTTP and stream one request")
    serve(folder, budgets)


def train_and_save(text: Text, tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedModel:
    """Train through the Accelerator and save sharded safetensors to `folder`; print perplexity before and after."""
    model = build_model(tokenizer, CONTEXT)
    before = perplexity(model, tokenizer, text.held_out, CONTEXT)
    # Matrices this small gain little from a second thread, and lose much where another program wants the core.
    torch.set_num_threads(1)
    accelerator = bigmodel.Accelerator()
    model = train(accelerator, model, tokenizer, text.training, CONTEXT)
    after = perplexity(model, tokenizer, text.held_out, CONTEXT)
    console.print(f"perplexity on held-out docstrings: {before:.0f} before, {after:.1f} after")
    accelerator.save_model(model, folder, max_shard_size="1MB")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shards = sorted(folder.glob("*.safetensors"))
    console.print(f"saved {format_size(sum(s.stat().st_size for s in shards))} in {len(shards)} shards")
    return model


def small_budgets(weights: int) -> dict[str, int]:
    """Return budgets for the accelerator and the host that together cannot hold the weights."""
    if not accelerators():
        os.environ["BIGMODEL_VIRTUAL"] = f"1x{weights}"
        bigmodel.devices.virtual.enable_from_environment()
        console.print("no accelerator on this machine: a virtual one stands in")
    return {"0": int(0.9 * weights), "cpu": int(0.6 * weights)}


def load(folder: Path, budgets: dict[str, int]) -> PreTrainedModel:
    """Load the checkpoint under the budgets and print the plan it was placed by."""
    reset_peak_memory(0)
    begun = time.perf_counter()
    model = bigmodel.from_pretrained(folder, max_memory=budgets, context_length=CONTEXT)
    seconds = time.perf_counter() - begun
    plan = bigmodel.get_plan(model)
    assert plan is not None
    console.print(plan.to_table())
    console.print(f"loaded and dispatched in {seconds:.2f} s")
    return model


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print what the model makes of the prompt."""
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    begun = time.perf_counter()
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80, **sampling)
    seconds = time.perf_counter() - begun
    console.print(tokenizer.decode(tokens[0]), style="bold", markup=False)
    console.print(f"{(tokens.shape[1] - prompt.shape[1]) / seconds:.1f} tokens/s")


def report_memory(model: PreTrainedModel) -> None:
    """Run the shape that was planned for, and print predicted beside measured memory of the accelerator."""
    plan = bigmodel.get_plan(model)
    assert plan is not None
    reset_peak_memory(0)
    with torch.no_grad():
        model(torch.zeros(1, CONTEXT, dtype=torch.long))
    predicted, measured = plan.devices[0].total, max_memory_allocated(0)
    console.print(
        f"accelerator 0: budget {format_size(plan.devices[0].budget or 0)}, predicted peak {format_size(predicted)}, "
        f"measured peak {format_size(measured)}"
    )
    for device, counters in model.dispatch_stats().items():
        console.print(
            f"to {device}: {format_size(counters['bytes_from_ram'])} from RAM, "
            f"{format_size(counters['bytes_from_disk'])} from disk in {counters['fetches']} fetches, "
            f"{counters['hit_rate']:.1%} there in time, link busy {counters['link_busy']:.0%} of the time"
        )


def serve(folder: Path, budgets: dict[str, int]) -> None:
    """Start `bigmodel serve` on a free port, stream one completion from it, and stop it."""
    memory = ",".join(f"{device}={size}" for device, size in budgets.items())
    command = [sys.executable, "-m", "bigmodel", "serve", str(folder), "--port", "0", "--max-memory", memory]
    command += ["--max-model-len", str(CONTEXT), "--max-sequences", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        address = wait_for_address(server)
        wait_until_ready(server, address)
        console.print(f"serving at {address}")
        console.print(PROMPT, style="bold", end="")
        for piece in stream_completion(address, PROMPT):
            console.print(piece, style="bold", end="", markup=False)
        console.print()
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for_address(server: subprocess.Popen[str]) -> str:
    """Return the address that the server says it listens on."""
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        found = [word for word in line.split() if word.startswith("http://")]
        if found:
            return found[0].rstrip("/.,)")
    raise RuntimeError(f"the server ended without saying where it listens:\n{''.join(said)}")


def wait_until_ready(server: subprocess.Popen[str], address: str) -> None:
    """Return when the server has loaded its model; RuntimeError if it ends before."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/ready", timeout=10).close()
        except urllib.error.HTTPError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server ended with exit code {server.returncode} while loading")


def stream_completion(address: str, prompt: str) -> Any:
    """Yield the pieces of text of one streamed completion."""
    body = {"model": "any", "prompt": prompt, "max_tokens": 80, "temperature": 0.7, "seed": 1, "stream": True}
    body["model"] = json.load(urllib.request.urlopen(f"{address}/v1/models", timeout=60))["data"][0]["id"]
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                choices = json.loads(text[6:])["choices"]
                if choices:
                    yield choices[0]["text"]


def step(title: str) -> None:
    """Print the title of the next part of the job."""
    console.print(f"\n{title}", style="bold cyan")


if __name__ == "__main__":
    main()

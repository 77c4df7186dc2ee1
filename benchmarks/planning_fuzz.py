"""Do budgets hold for random models, budgets and options, run on virtual accelerators?

Each case is planned by the search and its plan saved as JSON; another process, one for all cases, reads the plan,
dispatches the model by it and generates the planned shape. A device whose peak exceeds its budget or the prediction is
a violation. Peaks below the prediction are counted separately: mixtures are planned for their worst-case routing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .harness import Column, Limit, Report, Table
from .harness.isolate import import_folder

EXACT = "all resident, peaks predicted to the byte"
STREAMED = "parts streamed, peaks predicted to the byte"
BELOW = "parts streamed, a peak below the prediction (mixtures)"
ABOVE = "within the budgets, but a peak over the prediction"
VIOLATED = "a budget was passed"
FAILED = "the run failed"
REFUSED = "refused: the model does not fit"
HOST_ALONE = "the host runs it all"
OUTCOMES = (EXACT, STREAMED, BELOW, ABOVE, VIOLATED, FAILED, REFUSED, HOST_ALONE)

RAN = (EXACT, STREAMED, BELOW, ABOVE, VIOLATED, FAILED)
"""Outcomes of cases in which something ran on an accelerator."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--cases", type=int, default=None, help="how many are run (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--outcomes",
        type=Path,
        default=None,
        help="file that each outcome is added to; cases in it are not run again, and all in it are reported",
    )
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Plan random cases in this process and run them in another; count violations."""
    count = options.cases or (5 if options.quick else 500)
    found = _kept(options.outcomes)
    missing = [number for number in range(options.first, options.first + count) if number not in found]
    _prepare()
    with Worker() as worker:
        for number in missing:
            found[number] = worker.run(number, options.seed, planned(number, options.seed))
            if options.outcomes is not None:
                with options.outcomes.open("a") as file:
                    file.write(json.dumps([number, asdict(found[number])]) + "\n")
    return report(options.device, [found[number] for number in sorted({**_kept(options.outcomes), **found})])


def _kept(path: Path | None) -> dict[int, Outcome]:
    """Return the outcomes in a file by the number of their case."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {number: Outcome(**outcome) for number, outcome in lines}


class Worker:
    """A process that runs planned cases, one after another. A case in which it exits has failed; the next one starts a
    new process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: IO[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, number: int, seed: int, plan: str | None) -> Outcome:
        """Run case `number` by its plan as JSON; None: the case was refused."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._answers is not None
        try:
            self._process.stdin.write(json.dumps({"number": number, "seed": seed, "plan": plan}) + "\n")
            self._process.stdin.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return Outcome(**json.loads(answer))
        code = self._end()
        return Outcome(FAILED, {}, f"case {number}: the process that ran it ended with {code}")

    def _start(self) -> None:
        reads, writes = os.pipe()
        path = os.pathsep.join([str(import_folder()), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", __name__, str(writes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            pass_fds=[writes],
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(writes)
        self._answers = os.fdopen(reads)

    def _end(self) -> int:
        if self._process is None or self._answers is None or self._process.stdin is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait()
        self._answers.close()
        self._process = self._answers = None
        return code


def _serve(answers: IO[str]) -> None:
    """Answer each case on standard input with its outcome, until the input ends."""
    _prepare()
    for line in sys.stdin:
        answers.write(json.dumps(asdict(fuzz(**json.loads(line)))) + "\n")
        answers.flush()


@dataclass(frozen=True)
class FuzzCase:
    """The random parameters of a case, besides the model.

    Attributes:
        shapes: batch size, context length and new tokens.
        budgets: bytes by device key.
        choices: options of the plan: slots, streamed buffers, link dtype, bytes of the expert cache.
    """

    shapes: dict[str, Any]
    budgets: dict[Any, int]
    choices: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        kind: one of `OUTCOMES`.
        drawn: value by dimension, as text.
        said: predicted and measured bytes, if they differ.
    """

    kind: str
    drawn: Mapping[str, str]
    said: str = ""


def report(device: str, found: Sequence[Outcome]) -> Report:
    """Return the number of cases by outcome, in total and for each value of each dimension, and the limits."""
    kinds = Counter(outcome.kind for outcome in found)
    notes = [outcome.said for outcome in found if outcome.said and outcome.kind != BELOW]
    return Report(
        "planning_fuzz",
        device,
        settings={"cases": len(found)},
        tables=[
            Table(
                "Random models, budgets, shapes and choices",
                [Column("outcome"), Column("cases", "count")],
                [[name, kinds.get(name, 0)] for name in OUTCOMES],
            ),
            Table(
                "The same by dimension, of those that ran on an accelerator",
                [
                    Column("dimension"),
                    Column("value"),
                    Column("cases", "count"),
                    Column("streamed", "count"),
                    Column("to the byte", "count"),
                    Column("below the prediction", "count"),
                    Column("over the prediction", "count"),
                    Column("over a budget", "count"),
                ],
                [list(row) for row in _by_dimension(found)],
            ),
        ],
        limits=[
            Limit("budget violations", float(kinds[VIOLATED]), "==", 0, "count"),
            Limit("peaks over the prediction", float(kinds[VIOLATED] + kinds[ABOVE]), "==", 0, "count"),
            Limit("runs that failed", float(kinds[FAILED]), "==", 0, "count"),
        ],
        notes=[f"not as predicted: {said}" for said in notes[:5]],
    )


def _by_dimension(found: Sequence[Outcome]) -> Iterator[tuple[str, str, int, int, int, int, int, int]]:
    counted: dict[tuple[str, str], Counter[str]] = {}
    for outcome in found:
        for drawn in outcome.drawn.items():
            counted.setdefault(drawn, Counter())[outcome.kind] += 1
    for (dimension, value), kinds in sorted(counted.items()):
        ran = sum(kinds[kind] for kind in RAN)
        streamed, exact = kinds[STREAMED] + kinds[BELOW], kinds[EXACT] + kinds[STREAMED]
        over = kinds[ABOVE], kinds[VIOLATED]
        yield dimension, value, ran, streamed, exact, kinds[BELOW], *over


def planned(number: int, seed: int) -> str | None:
    """Return the plan of case `number` as JSON; None if it is refused."""
    from bigmodel.errors import BudgetError

    draw = random.Random(f"{seed} {number}")
    try:
        return str(plan_of(random_model(draw), draw).to_json())
    except BudgetError:
        return None


def fuzz(number: int, seed: int, plan: str | None) -> Outcome:
    """Run case `number` by its plan from `planned`. A case does not depend on those before it."""
    from bigmodel.devices import virtual
    from bigmodel.plan import Plan

    virtual.enable(2)
    draw = random.Random(f"{seed} {number}")
    model = random_model(draw)
    case = random_case(draw, model)
    drawn = {"model": type(model).__name__, **_values(case)}
    found = None if plan is None else Plan.from_json(plan)
    kind, said = outcome_of(model, found, case)
    told = f"case {number}: {drawn['model']} {case.shapes} {case.choices}, {said}" if said else ""
    return Outcome(kind, drawn, told)


def _prepare() -> None:
    import torch
    from transformers.utils import logging

    from bigmodel.devices import virtual

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    virtual.enable(2)


def _values(case: FuzzCase) -> dict[str, str]:
    cache = case.choices["expert_cache"]
    return {
        "accelerators": str(sum(isinstance(key, int) for key in case.budgets)),
        "slots": str(case.choices["slots"]),
        "streamed buffers": str(case.choices["offload_buffers"]),
        "link dtype": str(case.choices["offload_dtype"]),
        "expert cache": "default" if cache is None else "given",
    }


def random_model(draw: random.Random) -> Any:
    """Return a small model with random weights: a Llama, GPT-2, OPT or Mixtral, of random sizes."""
    import torch
    import transformers as t

    torch.manual_seed(draw.getrandbits(32))
    heads = draw.choice([2, 4])
    width, depth, words = 16 * heads * draw.randint(1, 2), draw.randint(2, 8), draw.randint(50, 600)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "vocab_size": words,
    }
    tied = draw.random() < 0.3
    kind = draw.choice(["llama", "gpt2", "opt", "mixtral"])
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(n_embd=width, n_layer=depth, n_head=heads, vocab_size=words)).eval()
    if kind == "opt":
        return t.OPTForCausalLM(t.OPTConfig(**sizes, ffn_dim=2 * width, word_embed_proj_dim=width)).eval()
    sizes |= {"intermediate_size": 2 * width, "num_key_value_heads": heads // 2}
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_local_experts=4)).eval()
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()


def random_case(draw: random.Random, model: Any) -> FuzzCase:
    """Return random shapes, budgets and choices for `model`, drawn after it."""
    new_tokens = draw.randint(1, 3)
    shapes = {
        "batch_size": draw.randint(1, 3),
        "context_length": draw.randint(new_tokens + 2, 64),
        "new_tokens": new_tokens,
    }
    weights = sum(tensor.nbytes for tensor in model.parameters())
    whole = int(weights * (1 + shapes["batch_size"] * shapes["context_length"] / 500))
    budgets: dict[Any, int] = {index: int(draw.uniform(0.2, 1.2) * whole) for index in range(draw.randint(1, 2))}
    budgets["cpu"] = 10**9 if draw.random() < 0.6 else int(draw.uniform(0.0, 0.8) * whole)
    choices = {
        "slots": draw.randint(1, 4),
        "offload_buffers": draw.random() < 0.5,
        "offload_dtype": draw.choice([None, None, "int8", "int4"]),
        "expert_cache": draw.choice([None, int(draw.uniform(0.0, 0.5) * whole)]),
    }
    return FuzzCase(shapes, budgets, choices)


def plan_of(model: Any, draw: random.Random) -> Any:
    """Return the plan of a random case for `model`.

    Raises:
        BudgetError: it does not fit.
    """
    from bigmodel.plan import plan
    from bigmodel.profile import profile_model
    from bigmodel.profile.machine.machine import nominal_machine

    case = random_case(draw, model)
    profile = profile_model(model, **case.shapes, device_type="virtual")
    return plan(profile, case.budgets, machine=nominal_machine(), **case.choices)


def outcome_of(model: Any, found: Any, case: FuzzCase) -> tuple[str, str]:
    """Run `model` by the plan `found` (None: there is none); return the outcome, and bytes that were not predicted."""
    if found is None:
        return REFUSED, ""
    if not isinstance(found.main_device, int):
        return HOST_ALONE, ""
    peaks = peaks_of(model, found)
    wrong = {key: peak for key, peak in peaks.items() if peak != found.devices[key].total}
    predicted = {key: found.devices[key].total for key in wrong}
    said = f"predicted {predicted}, measured {wrong}" if wrong else ""
    if any(peak > case.budgets[key] for key, peak in peaks.items()):
        return VIOLATED, said
    if any(peak > found.devices[key].total for key, peak in peaks.items()):
        return ABOVE, said
    if wrong:
        return BELOW if found.expert_cache else FAILED, said
    return (STREAMED if found.streamed else EXACT), ""


def peaks_of(model: Any, found: Any) -> dict[int, int]:
    """Return the peak bytes of each accelerator of the plan while the planned shape is generated."""
    import torch

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.dispatch import dispatch_model, undispatch
    from bigmodel.verify.planned_use import planned_use

    keys = [key for key in found.devices if isinstance(key, int)]
    gc.collect()
    before = {key: memory_allocated(key) for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        dispatch_model(model, found, offload_dir=folder)
        for key in keys:
            reset_peak_memory(key)
        with torch.inference_mode():
            planned_use(model, found).whole()
        peaks = {key: max_memory_allocated(key) - before[key] for key in keys}
        undispatch(model)
    return peaks


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        _serve(answers)

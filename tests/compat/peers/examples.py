"""Runs accelerate's own examples with one word replaced: `python -m tests.compat.peers.examples CHECKOUT/examples`.

Each example runs under accelerate and under this package, on one process and on two, with tiny models and data instead
of those of the Hub. Every loss that is differentiated must be the same to the last digit. Rows are not shuffled where
there are two processes: these shuffle as one would, accelerate's in another order. A run that is resumed from a step
must repeat the losses of the uninterrupted one, which accelerate's does not. Exits with 1 if losses differ.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from tests.ports import free_port

ROOT = Path(__file__).parents[3]
LIBRARIES = ("accelerate", "bigmodel")

EXAMPLES: dict[str, list[str]] = {
    "nlp_example.py": [],
    "complete_nlp_example.py": ["--checkpointing_steps", "epoch", "--output_dir", "OUT", "--project_dir", "OUT"],
    "cv_example.py": ["--data_dir", "PETS"],
    "complete_cv_example.py": [
        "--data_dir", "PETS", "--checkpointing_steps", "epoch", "--output_dir", "OUT", "--project_dir", "OUT",
    ],
    "by_feature/early_stopping.py": [],
    "by_feature/gradient_accumulation.py": ["--gradient_accumulation_steps", "3"],
    "by_feature/automatic_gradient_accumulation.py": [],
    "by_feature/gradient_accumulation_for_autoregressive_models.py": ["--per_device_batch_size", "4"],
    "by_feature/ddp_comm_hook.py": [],
    "by_feature/multi_process_metrics.py": [],
    "by_feature/memory.py": [],
    "by_feature/local_sgd.py": ["--local_sgd_steps", "3", "--gradient_accumulation_steps", "2"],
    "by_feature/checkpointing.py": ["--checkpointing_steps", "3", "--output_dir", "OUT"],
    "by_feature/profiler.py": [],
    "by_feature/tracking.py": ["--project_dir", "OUT"],
    "by_feature/cross_validation.py": ["--num_folds", "2"],
    "by_feature/schedule_free.py": [],
}  # fmt: skip
"""Examples with their arguments; OUT is a folder of the run's own, PETS one of small images."""

NEEDS = {
    "cv_example.py": ("timm", "torchvision"),
    "complete_cv_example.py": ("timm", "torchvision"),
    "by_feature/cross_validation.py": ("sklearn",),
    "by_feature/schedule_free.py": ("schedulefree",),
}
"""Packages beside transformers that examples import."""

RESUMED = "by_feature/checkpointing.py"


@cache
def pets() -> Path:
    """Return a folder of small images of two kinds, whose names begin with their label; removed at exit."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    for number in range(30):
        name, shade = ("cat", 90) if number % 2 else ("dog", 160)
        pixels = random.Random(number).choices(range(shade), k=40 * 40 * 3)
        Image.frombytes("RGB", (40, 40), bytes(pixels)).save(Path(folder.name) / f"{name}_{number}.jpg")
    return Path(folder.name)


def losses(library: str, example: Path, arguments: list[str], processes: int, out: Path) -> list[str]:
    """Run an example under one library; return its losses by rank, in order.

    Raises:
        RuntimeError: it fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    script = [str(ROOT / "tests/compat/programs/example.py"), library, str(example), str(processes)]
    folders = {"OUT": str(out), "PETS": str(pets())}
    command = [sys.executable, *script, *[folders.get(each, each) for each in arguments], "--cpu"]
    if processes > 1:
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(free_port())]
        command[1:1] = launch
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, cwd=out, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{example.name} fails under {library}:\n{done.stderr[-2000:]}")
    return sorted(re.findall(r"^LOSS .*$", done.stdout, re.MULTILINE), key=lambda line: line.split()[1])


def main() -> int:
    """Run the examples named, or all, and print a line for each. Return 1 if any gives other losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="accelerate's folder `examples`, of a checkout of its repository")
    parser.add_argument("names", nargs="*", help="examples; all by default")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as out:
        for name, arguments in EXAMPLES.items():
            if given.names and not any(each in name for each in given.names):
                continue
            missing = [package for package in NEEDS.get(name, ()) if find_spec(package) is None]
            if missing:
                print(f"{name}: not run, needs the package {', '.join(missing)}", flush=True)
                continue
            for processes in given.processes:
                runs = [
                    losses(library, given.folder / name, arguments, processes, Path(out) / library / name)
                    for library in LIBRARIES
                ]
                same = runs[0] == runs[1] and len(runs[0]) > 0
                if same and name == RESUMED and processes == 1:
                    state = Path(out) / LIBRARIES[1] / name / "step_3"
                    again = [*arguments, "--resume_from_checkpoint", str(state)]
                    same = losses(LIBRARIES[1], given.folder / name, again, 1, Path(out) / "resumed") == runs[1][3:]
                wrong += not same
                print(f"{name}, {processes}: {len(runs[0])} losses, {'same' if same else 'OTHER'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

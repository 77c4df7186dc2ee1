"""Runs transformers' own cases of offload, parallelism and training under the stand-in:
`python -m tests.compat.peers.transformers`.

``TRANSFORMERS_SOURCE`` names the folder of a checkout of its repository, of about the version that is installed: its
``tests`` are run. The files beside the tests of models, `ModelTesterMixin` among them, are those of the version that is
installed, from the source distribution that the package index has. Nothing of either is kept in the repository.

The cases of models run on two virtual accelerators, those of disk also on the CPU alone; those of the Trainer run on
the CPU, in one process and in two. Groups may be left out: `... transformers models trainer` leaves out `distributed`.
Exits with 1 if a case fails that has no reason in `transformers_reasons`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from . import distributed
from .cases import distribution, run_cases, told
from .transformers_reasons import BY_ERROR, REASON_OF

SOURCE = "TRANSFORMERS_SOURCE"
MODELS = (
    *("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox", "falcon", "opt", "mixtral"),
    *("t5", "bart", "whisper", "vit", "clip"),
)
"""Folders of models, each with a file of tests: decoders, encoders, experts, text to text, sound, images."""

ON_ACCELERATORS = "disk_offload or cpu_offload or model_parallelism"
ON_THE_HOST = "disk_offload"
TRAINER = (
    *("data_collator", "trainer", "trainer_accelerator", "trainer_callback", "trainer_checkpointing", "trainer_data"),
    *("trainer_evaluation", "trainer_hyperparameter", "trainer_optimizers", "trainer_seq2seq", "training_args"),
)
NEEDS = ("parameterized", "timeout_decorator")
"""Packages that the tests import and this project does not."""


def lay_out(checkout: Path, folder: Path) -> None:
    """Put the tests of a checkout into `folder`, and over them the files of the version that is installed."""
    for name in ("tests", "utils"):
        shutil.copytree(checkout / name, folder / name)
    shutil.copy(checkout / "conftest.py", folder)
    for file in (distribution("transformers") / "tests").glob("*.py"):
        shutil.copy(file, folder / "tests")
    # Helpers of the tests read transformers' source in the place where a checkout has it.
    installed = find_spec("transformers")
    assert installed is not None
    assert installed.origin is not None
    (folder / "src").mkdir()
    (folder / "src" / "transformers").symlink_to(Path(installed.origin).parent)


def main(groups: list[str]) -> int:
    """Run the groups that are named, or all, and print how cases ended. Return 1 if any failed without a reason."""
    missing = [package for package in NEEDS if find_spec(package) is None]
    if SOURCE not in os.environ or missing:
        why = f"{SOURCE} names no checkout" if SOURCE not in os.environ else f"they need {', '.join(missing)}"
        print(f"transformers' own tests: not run, {why}")
        return 0
    unexplained = 0
    files = [f"tests/models/{name}/test_modeling_{name}.py" for name in MODELS]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        lay_out(Path(os.environ[SOURCE]), folder)
        if "models" in groups or not groups:
            for device, cases in (("virtual", ON_ACCELERATORS), ("cpu", ON_THE_HOST)):
                variables = {"TRANSFORMERS_TEST_DEVICE": device, "OFFLOAD_CASES": "1"}
                outcome = run_cases(folder, "transformers_cases", [*files, "-k", cases], variables)
                what = f"transformers {version('transformers')}, {len(MODELS)} folders of models on {device}"
                unexplained += told(what, outcome, REASON_OF)
        if "trainer" in groups or not groups:
            trainer = [f"tests/trainer/test_{name}.py" for name in TRAINER]
            outcome = run_cases(folder, "transformers_cases", trainer, {"TRANSFORMERS_TEST_DEVICE": "cpu"})
            unexplained += told("transformers' tests of the Trainer on cpu", outcome, REASON_OF, BY_ERROR)
        if "distributed" in groups or not groups:
            variables = distributed.lay_out(folder)
            outcome = run_cases(folder, "transformers_distributed", distributed.FILES, variables)
            unexplained += told("transformers' tests of the Trainer on two processes", outcome, REASON_OF, BY_ERROR)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs peft's own cases of offloading under the stand-in: `python -m tests.compat.peers.peft`.

They are of the version that is installed, from the source distribution that the package index has; nothing of it is
kept in the repository. They load, run and merge adapters on models that lie in part on the host and on disk, beside a
virtual accelerator. The models are those that the cases name, with random weights, laid where the libraries look first.

One assertion of two cases is replaced: parameters on disk are real tensors on the host, not on meta. Exits with 1 if a
case fails.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from .accelerate import source
from .cases import distribution, run_cases, told

CASES = "tests/test_gpu_examples.py"
CHOSEN = "TestOffloadSave"
NEEDS = ("datasets", "parameterized")
"""Packages that the tests import and this project does not."""

ON_META = "assert len({p.device for p in offloaded_model.parameters()}) == 2  # 'cpu' and 'meta'"
REAL = "assert {p.device.type for p in offloaded_model.parameters()} == {'cpu'}"


def lay_out(folder: Path) -> None:
    """Write the tests and the models that they load into `folder`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    from tests.compat.programs.example import tokenizer

    shutil.copytree(distribution("peft") / "tests", folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    cases = folder / CASES
    cases.write_text(cases.read_text().replace(ON_META, REAL))
    gpt2 = GPT2LMHeadModel(GPT2Config())
    with torch.no_grad():
        # Logits are about -38, as far from zero as those of the trained model: the cases compare them relatively.
        gpt2.transformer.ln_f.bias.fill_(-1)
        gpt2.transformer.wte.weight.add_(0.05)
    for name, model in (
        ("gpt2", gpt2),
        ("peft-internal-testing/opt-125m", OPTForCausalLM(OPTConfig())),
    ):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def main() -> int:
    """Run the cases and print how they ended. Return 1 if one failed."""
    missing = [package for package in NEEDS if find_spec(package) is None]
    if missing:
        print(f"peft's own cases of offloading: not run, they need {', '.join(missing)}")
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        lay_out(folder)
        variables = {"ACCELERATE_SOURCE": str(source())}
        outcome = run_cases(folder, "peft_cases", [CASES, "-k", CHOSEN], variables)
    return 1 if told(f"peft {version('peft')}, offloading", outcome, {}) else 0


if __name__ == "__main__":
    sys.exit(main())

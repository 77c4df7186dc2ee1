"""Runs accelerate's own scripts, word for word, on two processes under the stand-in.

They are those in ``accelerate/test_utils/scripts``, which accelerate's tests launch on GPUs; here the processes meet
over gloo. ``python -m tests.compat.peers.scripts NAMES...``: names are parts of those of scripts; all are run by
default. Exits with 1 if a script fails that has no reason in `reasons`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .accelerate import ROOT, VERSION, source
from .offline_hub import UNDECIDED, lay_out
from .reasons import REASON_OF

PROGRAM = ROOT / "tests" / "compat" / "programs" / "accelerate_script.py"
SCRIPTS_AT = Path("src", "accelerate", "test_utils", "scripts")
HUB = ("datasets", "evaluate")
TIME_LIMIT = 400.0
"""Seconds for one run."""


@dataclass(frozen=True)
class Run:
    """One run of a script.

    Attributes:
        script: Its path among the scripts, without the ending.
        arguments: Its own. Files that they name are in a folder that all runs share.
        call: Functions to call instead of its main part, which leaves them out where there is no GPU.
        needs: Packages that it imports and this project does not.
        launched: Whether two processes run it; else one runs it, and it starts others itself.
        seconds: The time it may take.
    """

    script: str
    arguments: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    launched: bool = True
    seconds: float = TIME_LIMIT

    @property
    def reason(self) -> str | None:
        """Why it may fail; None for no reason."""
        script = f"scripts/{self.script}.py"
        return REASON_OF.get(script) or REASON_OF.get("::".join((script, *self.call)))

    @property
    def name(self) -> str:
        """The script, with what tells its runs apart."""
        what = ", ".join(self.call) or " ".join(self.arguments)
        return f"{self.script} ({what})" if what else self.script


RUNS = (
    Run("test_script"),
    Run("test_sync"),
    Run("test_ops"),
    Run("test_distributed_data_loop", needs=("torchdata",)),
    Run(
        "test_notebook",
        call=(
            *("test_can_initialize", "test_clean_cuda_fork", "test_static_rdzv_backend", "test_c10d_rdzv_backend"),
            "test_monitoring",
        ),
        launched=False,
    ),
    Run("test_notebook", call=("test_problematic_imports",), needs=("bitsandbytes",), launched=False),
    Run("test_notebook", call=("test_fault_tolerant",), launched=False, seconds=60.0),
    Run("test_cli"),
    Run("test_ddp_comm_hook"),
    Run("test_merge_weights"),
    Run("external_deps/test_checkpointing", ("--partial_train_epoch=1",), needs=HUB),
    Run("external_deps/test_checkpointing", ("--resume_from_checkpoint=epoch_0",), needs=HUB),
    Run("external_deps/test_metrics", needs=HUB),
    Run(
        "external_deps/test_metrics",
        call=(
            "test_mrpc",
            "test_gather_for_metrics_with_iterable_dataset",
            "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset",
        ),
        needs=HUB,
    ),
    Run("external_deps/test_performance", needs=HUB),
    Run("external_deps/test_peak_memory_usage", needs=HUB),
    Run("external_deps/test_pippy", call=("test_gpt2", "test_bert")),
    Run("external_deps/test_zero3_integration", needs=("deepspeed",)),
    Run(
        "external_deps/test_ds_multiple_model",
        (f"--model_name_or_path={UNDECIDED}", "--num_epochs=12"),
        needs=("deepspeed", *HUB),
    ),
    Run("external_deps/test_ds_alst_ulysses_sp", needs=("deepspeed",)),
)


def outcome(run: Run, folder: Path) -> str:
    """Run a script in `folder`; return "" if it passes, else the end of what it wrote to standard error."""
    command = [sys.executable, "-m", "bigmodel"]
    if run.launched:
        command += ["launch", "--cpu", "--num_processes=2", "--module", "bigmodel"]
    command += ["run", str(PROGRAM)]
    command += ["--call", ",".join(run.call)] if run.call else []
    command += [str(folder / SCRIPTS_AT / f"{run.script}.py"), *run.arguments]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ACCELERATE_SOURCE": str(folder),
        "ACCELERATE_NUM_PROCESSES": "2",
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with (folder / "errors").open("w+") as errors:
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, stderr=errors, timeout=run.seconds
            )
        except subprocess.TimeoutExpired:
            return f"no end after {run.seconds:.0f} s"
        errors.seek(0)
        return errors.read()[-4000:] or "no message" if done.returncode else ""


def main(names: list[str]) -> int:
    """Run the scripts whose names hold one of `names`, or all, and print a line for each. Return 1 if any fails
    without a reason."""
    chosen = [run for run in RUNS if not names or any(name in run.name for name in names)]
    passed, unexplained = 0, 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copytree(source() / SCRIPTS_AT.parent, folder / SCRIPTS_AT.parent)
        lay_out(folder)
        for run in chosen:
            missing = [package for package in run.needs if find_spec(package) is None]
            if missing:
                print(f"{run.name}: not run, needs the package {', '.join(missing)}", flush=True)
                continue
            problem = outcome(run, folder)
            passed += not problem
            unexplained += bool(problem) and run.reason is None
            print(f"{run.name}: {f'failed: {run.reason or problem}' if problem else 'passed'}", flush=True)
    print(f"accelerate {VERSION}: {passed} of {len(chosen)} runs of scripts passed; {unexplained} failed unexplained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

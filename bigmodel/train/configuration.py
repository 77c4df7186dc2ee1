"""Dataclasses that configure the Accelerator: the project folder, data loading, accumulation, compilation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.handlers import KwargsHandler


@dataclass
class ProjectConfiguration:
    """Folders of a project and naming of its checkpoints.

    Attributes:
        project_dir: the project's folder.
        logging_dir: the folder of its logs; `project_dir` by default.
        automatic_checkpoint_naming: `save_state` writes `project_dir/checkpoints/checkpoint_<iteration>`.
        total_limit: largest number of automatic checkpoints to keep; older ones are removed.
        iteration: the number of the next automatic checkpoint.
        save_on_each_node: the main process of every machine writes, for folders that machines do not share.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise TrainError(f"total_limit is {self.total_limit}; keep at least 1 checkpoint, or None for all")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and the logging folder if that is not set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@dataclass
class DataLoaderConfiguration:
    """Distribution of data among processes by prepared data loaders.

    Attributes:
        split_batches: the loader's batch size is that of all processes together, instead of each process's.
        dispatch_batches: the main process reads the data and sends each process its part. None: only for an iterable
            dataset that cannot be sharded.
        even_batches: all processes get equally many samples; the last batches are filled with repeated samples, which
            `gather_for_metrics` drops.
        use_seedable_sampler: shuffle epoch e with seed + e, independent of the global generator.
        data_seed: that seed; None: drawn from the global generator.
        non_blocking: copy batches to the device asynchronously. On accelerators with pinned memory.
        use_stateful_dataloader: use torchdata's `StatefulDataLoader`, which resumes in mid-epoch after `load_state`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Gradient accumulation.

    Attributes:
        num_steps: backward passes per optimizer step.
        adjust_scheduler: the scheduler also counts the accumulating passes.
        sync_with_dataloader: the end of a data loader ends the accumulation window early.
        sync_each_batch: synchronize gradients at every pass (less memory with sharded parameters, more communication).
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise TrainError(f"gradient accumulation over {self.num_steps} steps; give 1 or more")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`. `backend` "no" (or None without the launcher's variable) compiles nothing.

    `use_regional_compilation` compiles each repeated block of the model once instead of the whole model.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = environment.DYNAMO_PREFIX
        self.backend = str(self.backend or environment.text(prefix + "BACKEND", "no")).lower()
        self.mode = self.mode or environment.text(prefix + "MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = environment.flag(prefix + "USE_FULLGRAPH")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = environment.flag(prefix + "USE_REGIONAL_COMPILATION")
        if self.dynamic is None and os.environ.get(prefix + "USE_DYNAMIC"):
            self.dynamic = environment.flag(prefix + "USE_DYNAMIC")

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that were given or say something."""
        return {name: value for name, value in super().to_kwargs().items() if value is not False}

    @property
    def enabled(self) -> bool:
        """Whether models are compiled."""
        return self.backend != "no" and not self.disable

    def compile_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile`."""
        kwargs: dict[str, Any] = {
            "backend": self.backend,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "disable": self.disable,
        }
        if self.options is not None:
            kwargs["options"] = self.options
        elif self.mode != "default":
            kwargs["mode"] = self.mode
        return kwargs

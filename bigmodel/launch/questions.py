"""The interview of `bigmodel config`: asks a few questions and returns a LaunchConfig."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.prompt import Confirm, FloatPrompt, IntPrompt, Prompt

from ..errors import LaunchError
from ..limits import RENDEZVOUS_PORT
from .settings import MIXED_PRECISIONS, LaunchConfig


def ask_configuration(console: Console | None = None) -> LaunchConfig:
    """Ask on the terminal for every setting that `bigmodel launch` needs.

    Raises:
        LaunchError: the input ended before the last question.
    """
    try:
        return _Interview(console or Console()).run()
    except EOFError:
        raise LaunchError(
            "The input ended before all questions were answered; nothing was written. "
            "Without a terminal use `bigmodel config default`."
        ) from None


class _Interview:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.answers: dict[str, Any] = {}

    def run(self) -> LaunchConfig:
        machines = self._machines()
        cpu = self._choice("Train on", ["gpu", "cpu"], "gpu" if _gpus() else "cpu") == "cpu"
        kind = self._choice("Share the work by", ["ddp", "fsdp", "deepspeed", "tp"], "ddp")
        if kind == "fsdp":
            self._fsdp()
        elif kind == "deepspeed":
            self._deepspeed()
        total = self._number("Processes in total, over all machines", machines * max(1, 0 if cpu else _gpus()))
        if kind == "tp":
            self.answers["parallelism_config_tp_size"] = self._number("Processes that split each layer", total)
        if not cpu:
            self.answers["gpu_ids"] = self._text("GPUs of this machine: all, or numbers like 0,1", "all")
        self.answers.update(
            use_cpu=cpu,
            num_processes=total,
            distributed_type=_distributed_type(kind, total, cpu),
            mixed_precision=self._choice("Mixed precision", list(MIXED_PRECISIONS), "no"),
        )
        if self._yes("Compile models with torch.compile?", False):
            self.answers["dynamo_backend"] = self._text("Backend of torch.compile", "inductor").upper()
        return LaunchConfig().replace(self.answers)

    def _machines(self) -> int:
        machines = self._number("Machines", 1)
        self.answers["num_machines"] = machines
        if machines > 1:
            self.answers["machine_rank"] = self._number("The number of this machine, from 0", 0)
            self.answers["main_process_ip"] = self._text("Address of machine 0", None)
            self.answers["main_process_port"] = self._number("Port on machine 0", RENDEZVOUS_PORT)
            self.answers["rdzv_backend"] = self._choice("Rendezvous", ["static", "c10d"], "static")
        return machines

    def _fsdp(self) -> None:
        policies = ["transformer_based_wrap", "size_based_wrap", "no_wrap"]
        policy = self._choice("What becomes one sharded unit", policies, policies[0]).upper()
        self.answers.update(
            fsdp_version=2,
            fsdp_reshard_after_forward=str(
                self._yes("Free gathered parameters after forward (less memory, more traffic)?", True)
            ).lower(),
            fsdp_offload_params=self._yes("Keep shards in RAM between uses?", False),
            fsdp_auto_wrap_policy=policy,
        )
        if policy == "TRANSFORMER_BASED_WRAP":
            names = self._text("Class names of the blocks, comma separated (empty: as the model says)", "")
            self.answers["fsdp_transformer_layer_cls_to_wrap"] = names or None
        elif policy == "SIZE_BASED_WRAP":
            self.answers["fsdp_min_num_params"] = self._number("Parameters that make a unit", 100_000_000)
        kinds = ["sharded_state_dict", "full_state_dict"]
        self.answers["fsdp_state_dict_type"] = self._choice("Checkpoints", kinds, kinds[0]).upper()
        self.answers["fsdp_activation_checkpointing"] = self._yes("Recompute activations in backward?", False)

    def _deepspeed(self) -> None:
        path = self._text("DeepSpeed configuration file (empty: answer questions instead)", "")
        if path:
            self.answers["deepspeed_config_file"] = path
            return
        stage = int(self._choice("ZeRO stage", ["0", "1", "2", "3"], "2"))
        self.answers["zero_stage"] = stage
        if stage >= 1:
            self.answers["offload_optimizer_device"] = self._choice(
                "Optimizer state lives on", ["none", "cpu", "nvme"], "none"
            )
        if stage == 3:
            self.answers["offload_param_device"] = self._choice("Parameters live on", ["none", "cpu", "nvme"], "none")
            self.answers["zero3_init_flag"] = self._yes("Shard parameters while the model is built?", False)
            self.answers["zero3_save_16bit_model"] = self._yes("Gather 16-bit weights on saving?", False)
        for what in ("optimizer", "param"):
            if self.answers.get(f"offload_{what}_device") == "nvme":
                self.answers[f"offload_{what}_nvme_path"] = self._text(f"Folder on disk for {what}s", None)
        self.answers["gradient_accumulation_steps"] = self._number("Batches added up per step", 1)
        if self._yes("Clip gradients?", False):
            self.answers["gradient_clipping"] = FloatPrompt.ask("Largest norm", console=self.console, default=1.0)

    def _text(self, question: str, default: str | None) -> str:
        options: dict[str, Any] = {} if default is None else {"default": default}
        return Prompt.ask(question, console=self.console, **options)

    def _choice(self, question: str, choices: list[str], default: str) -> str:
        return Prompt.ask(question, console=self.console, choices=choices, default=default)

    def _number(self, question: str, default: int) -> int:
        return IntPrompt.ask(question, console=self.console, default=default)

    def _yes(self, question: str, default: bool) -> bool:
        return Confirm.ask(question, console=self.console, default=default)


def _distributed_type(kind: str, total: int, cpu: bool) -> str:
    if kind != "ddp":
        return kind.upper()
    if total == 1:
        return "NO"
    return "MULTI_CPU" if cpu else "MULTI_GPU"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()

"""`DeepSpeedPlugin`: ZeRO stage, offload, and the other settings of a DeepSpeed configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.strategies.deepspeed.config import AUTO, DeepSpeedConfig

_PREFIX = "ACCELERATE_DEEPSPEED_"
_ZERO = "zero_optimization"
_DEVICES = ("none", "cpu", "nvme")

# Where each field of the plugin lies in a DeepSpeed configuration.
_PLACES = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}


@dataclass
class DeepSpeedPlugin:
    """Settings of DeepSpeed ZeRO. Fields left at None are read from the variables `bigmodel launch` sets.

    Attributes:
        hf_ds_config: a DeepSpeed configuration: a dict, the path of a JSON file, or a `DeepSpeedConfig`, which stays
            the same object, as transformers goes on to fill in its own. Values of "auto" in it are filled in from the
            fields below, the models and the data loaders.
        gradient_accumulation_steps: backward passes to one step; "auto": as the Accelerator says.
        gradient_clipping: largest norm of the gradients; "auto": as `clip_grad_norm_` is called.
        zero_stage: 0 (plain data parallelism), 1 (optimizer state is sharded), 2 (gradients too), 3 (parameters too).
        is_train_batch_min: of several data loaders the smallest batch size counts, else the largest.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme".
        offload_optimizer_nvme_path, offload_param_nvme_path: folders, with "nvme".
        zero3_init_flag: `from_pretrained` of transformers shards parameters while it loads them (stage 3).
        zero3_save_16bit_model: passed to DeepSpeed; saving through the Accelerator gathers weights in any case.
        transformer_moe_cls_names: class names of mixture-of-experts blocks, comma separated, that are kept as one.

    Raises:
        TrainError: a value that is not understood.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._selected = False
        if self.enable_msamp:
            raise TrainError("MS-AMP is not supported; use mixed_precision='fp8' with FSDP, or 'bf16' with DeepSpeed")
        given = self.hf_ds_config or os.environ.get(_PREFIX + "CONFIG_FILE") or None
        is_given = given not in (None, "none")
        self._read_environment(from_file=is_given)
        self.hf_ds_config = given if isinstance(given, DeepSpeedConfig) else DeepSpeedConfig(given if is_given else {})
        if is_given and _ZERO not in self.hf_ds_config.config:
            raise TrainError("the DeepSpeed configuration has no zero_optimization section; say at least its stage")
        self._merge()
        self._check()
        self.deepspeed_config = self.hf_ds_config.config
        if self.zero3_init_flag is None:
            self.zero3_init_flag = environment.flag(_PREFIX + "ZERO3_INIT", self.hf_ds_config.is_zero3())
        self.zero3_init_flag = bool(self.zero3_init_flag and self.hf_ds_config.is_zero3())
        if self.zero3_init_flag:
            self._configure_transformers()

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The configuration's value at a dotted name."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the configuration's value at a dotted name waits to be filled in."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def is_zero3_init_enabled(self) -> bool:
        """Whether `from_pretrained` of transformers shards parameters while it loads them."""
        return bool(self.zero3_init_flag)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in the configuration's value at a dotted name if it is "auto", else compare it with the one given.

        Args:
            mismatches: A line is added for a value that differs.
            must_match: Compare.
            kwargs: Values by dotted name.

        Raises:
            TrainError: The value is "auto" and none is given.
        """
        config: DeepSpeedConfig = self.hf_ds_config
        node, last = config.find_config_node(ds_key_long)
        if node is None:
            return
        if config.is_auto(ds_key_long):
            if ds_key_long not in kwargs:
                raise TrainError(f"{ds_key_long} is 'auto' in the DeepSpeed configuration, and no value of it is given")
            node[last] = kwargs[ds_key_long]
            return
        here, given = node.get(last), kwargs.get(ds_key_long)
        if must_match and mismatches is not None and ds_key_long in kwargs and here not in (None, given):
            mismatches.append(f"- ds {ds_key_long}={here} vs arg {ds_key_long}={given}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Do `fill_match` for every value of the configuration.

        Args:
            prefix: The dotted name of `config`, with a dot at its end.
            mismatches: Lines on values that differ; with a `prefix` they are left to the caller.
            config: A part of the configuration; None: all of it.
            must_match: Whether values may not differ from those given.
            kwargs: Values by dotted name.

        Raises:
            TrainError: A value is "auto" and none is given, or values differ.
        """
        found = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, found, must_match, **kwargs)
        if found and not prefix:
            raise TrainError(
                "the DeepSpeed configuration differs from what is given; set these values to 'auto' there:\n"
                + "\n".join(found)
            )

    @property
    def selected(self) -> bool:
        """Whether the run uses this plugin: the one that is given, or of several the one that was selected last."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Tell transformers of this plugin's configuration. For the run's state, which selects among plugins.

        Raises:
            TrainError: A program calls it.
        """
        if not _from_accelerator_state:
            raise TrainError("a DeepSpeedPlugin is selected by accelerator.state.select_deepspeed_plugin(name)")
        self.set_deepspeed_weakref()
        self.mark_selected()

    def mark_selected(self, selected: bool = True) -> None:
        """Write down whether the run uses this plugin."""
        self._selected = selected

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Have DeepSpeed keep blocks of the classes in `transformer_moe_cls_names` as one (stage 3).

        Raises:
            TrainError: The model has no module of such a class.
            ImportError: DeepSpeed is not installed.
        """
        if not self.transformer_moe_cls_names or self.zero_stage != 3:
            return
        names = {name.strip() for name in self.transformer_moe_cls_names.split(",")}
        classes = {type(module) for module in model.modules() if type(module).__name__ in names}
        missing = names - {cls.__name__ for cls in classes}
        if missing:
            raise TrainError(f"{type(model).__name__} has no module of class {', '.join(sorted(missing))}")
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list(classes))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the Accelerator's precision into the configuration.

        Raises:
            TrainError: the configuration asks for another one.
        """
        config: DeepSpeedConfig = self.hf_ds_config
        wanted = {"fp16": mixed_precision == "fp16", "bf16": mixed_precision in ("bf16", "fp8")}
        for name, on in wanted.items():
            config.fill(f"{name}.enabled", on)
            if mixed_precision == "no" and config.is_true(f"{name}.enabled"):
                continue
            if not on and config.is_true(f"{name}.enabled"):
                raise TrainError(
                    f"mixed_precision is {mixed_precision!r}, but the DeepSpeed configuration enables {name}; "
                    "set it to 'auto' there"
                )
            if on:
                config.set_value(f"{name}.enabled", True)
        if wanted["fp16"] and config.get_value("fp16.auto_cast") is None:
            config.set_value("fp16.auto_cast", True)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Within it `from_pretrained` shards parameters while loading (True) or does not (False)."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable and self.hf_ds_config.is_zero3()
        self._configure_transformers()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self._configure_transformers()

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers of the configuration; it shards models while loading if the plugin says so."""
        self._configure_transformers()

    def _read_environment(self, from_file: bool) -> None:
        """Read the launcher's settings. Values of the file are overridden by explicit settings, not by defaults."""
        steps = os.environ.get(environment.GRADIENT_ACCUMULATION_STEPS)
        if self.gradient_accumulation_steps is None and (steps or not from_file):
            self.gradient_accumulation_steps = int(steps) if steps and steps.isdigit() else AUTO
        clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING")
        if self.gradient_clipping is None and clipping and clipping not in (AUTO, "none"):
            self.gradient_clipping = float(clipping)
        if self.zero_stage is None and (not from_file or _PREFIX + "ZERO_STAGE" in os.environ):
            self.zero_stage = environment.integer(_PREFIX + "ZERO_STAGE", 2)
        for name in ("offload_optimizer", "offload_param"):
            for what in ("device", "nvme_path"):
                if getattr(self, f"{name}_{what}") is None:
                    default = None if from_file or what == "nvme_path" else "none"
                    setattr(self, f"{name}_{what}", os.environ.get(f"{_PREFIX}{name}_{what}".upper(), default))
        if self.zero3_save_16bit_model is None and not from_file:
            self.zero3_save_16bit_model = environment.flag(_PREFIX + "ZERO3_SAVE_16BIT_MODEL")
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = os.environ.get(_PREFIX + "MOE_LAYER_CLS_NAMES") or None

    def _merge(self) -> None:
        """Fill missing and "auto" values of the configuration from the fields; then set the fields from it."""
        config: DeepSpeedConfig = self.hf_ds_config
        for name, place in _PLACES.items():
            value = getattr(self, name)
            unset = config.get_value(place) in (None, AUTO)
            if value is not None and value != AUTO and unset and not (name.endswith("_device") and value == "none"):
                config.set_value(place, value)
            elif config.is_auto(place) and value is None and name.startswith("offload"):
                config.set_value(place, "none" if name.endswith("device") else None)
            final = config.get_value(place)
            if final is not None:
                setattr(self, name, final)
        config.config.setdefault("steps_per_print", float("inf"))

    def _check(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise TrainError(f"zero_stage is {self.zero_stage!r}; it must be 0, 1, 2 or 3")
        for name in ("optimizer", "param"):
            device = getattr(self, f"offload_{name}_device") or "none"
            if device not in _DEVICES:
                raise TrainError(f"offload_{name}_device is {device!r}; one of: {', '.join(_DEVICES)}")
            if device == "nvme" and not getattr(self, f"offload_{name}_nvme_path"):
                raise TrainError(f"offload_{name}_device is 'nvme': give a folder in offload_{name}_nvme_path")
        if (self.offload_param_device or "none") != "none" and self.zero_stage != 3:
            raise TrainError(f"offload_param_device needs zero_stage 3, not {self.zero_stage}")
        if (self.offload_optimizer_device or "none") != "none" and self.zero_stage == 0:
            raise TrainError("offload_optimizer_device needs zero_stage 1, 2 or 3")

    def _configure_transformers(self) -> None:
        """Set whether transformers shards models while loading. It keeps only a weak reference to the configuration."""
        try:
            from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
        except ImportError:
            return
        if not self.zero3_init_flag:
            unset_hf_deepspeed_config()
            return
        self._told = DeepSpeedConfig(copy.deepcopy(self.hf_ds_config.config))
        self._told.fill("train_micro_batch_size_per_gpu", 1)
        self._told.config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._told.config.pop("train_batch_size", None)
        for name in self._told.autos():
            *way, last = name.split(".")
            node = self._told.get_value(".".join(way)) if way else self._told.config
            node.pop(last)
        set_hf_deepspeed_config(self._told)

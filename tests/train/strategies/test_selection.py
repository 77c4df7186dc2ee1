"""Which strategy a kind of training uses, imported only when it is chosen."""

from __future__ import annotations

import subprocess
import sys

from bigmodel.train.strategies.base import Strategy
from bigmodel.train.strategies.selection import PARALLELISM_CONFIG, PLUGINS, STRATEGIES, load
from bigmodel.train.types import DistributedType


def test_every_kind_has_a_strategy_that_knows_its_kind() -> None:
    assert set(STRATEGIES) == set(DistributedType)
    for kind, name in STRATEGIES.items():
        cls = load(name)
        assert issubclass(cls, Strategy)
        assert cls.distributed_type in (kind, DistributedType.MULTI_GPU)


def test_plugins_can_be_made_without_arguments() -> None:
    for name in (*PLUGINS.values(), PARALLELISM_CONFIG):
        assert load(name)()


def test_nothing_is_imported_before_it_is_chosen() -> None:
    code = "import sys, bigmodel.train; sys.exit(any('strategies.fsdp' in m or 'deepspeed' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

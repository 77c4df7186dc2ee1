"""Tensor parallelism: plans that say which layers are split, and training that equals that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from bigmodel.errors import TrainError
from bigmodel.train.strategies.sharded import tensor_parallel as tensor_plan
from bigmodel.train.strategies.sharded.tensor_parallel import model_plan, parallelize
from tests.dispatch.models import llama
from tests.examples import alike
from tests.shared import Once
from tests.train.multiprocess import run_on_ranks

from .. import split

TWO: Any = SimpleNamespace(size=lambda: 2)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What PyTorch is asked to split, by module name."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(tensor_plan, "parallelize_module", lambda model, mesh, styles: asked.update(styles))
    return asked


def test_the_plan_of_a_transformers_model_has_full_names() -> None:
    plan = model_plan(llama(1))
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert any(name.startswith("lm_head") for name in plan)
    assert model_plan(nn.Linear(1, 1)) == {}


def test_stars_stand_for_numbers(chosen: dict[str, Any]) -> None:
    parallelize(
        llama(2), TWO, {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.1.mlp.down_proj": "rowwise"}
    )
    assert sorted(chosen) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert isinstance(chosen["model.layers.0.self_attn.q_proj"], ColwiseParallel)
    assert isinstance(chosen["model.layers.1.mlp.down_proj"], RowwiseParallel)


def test_a_weight_shared_with_another_module_stays_whole(chosen: dict[str, Any]) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4), "other": nn.Linear(2, 4)})
    model["head"].weight = model["embed"].weight
    parallelize(model, TWO, {"head": "colwise", "other": "colwise"})
    assert list(chosen) == ["other"]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (None, "has no tensor parallel plan"),
        ({"0": "diagonal"}, "0 is to be split 'diagonal', which is not supported"),
        ({"missing": "colwise"}, "names none of its modules"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(plan: dict[str, str] | None, says: str) -> None:
    with pytest.raises(TrainError, match=says):
        parallelize(nn.Sequential(nn.Linear(2, 2)), TWO, plan)


def test_heads_must_divide_by_the_ranks() -> None:
    three: Any = SimpleNamespace(size=lambda: 3)
    with pytest.raises(TrainError, match="num_attention_heads 4 of LlamaForCausalLM does not divide by tp_size 3"):
        parallelize(llama(1), three)


def trained(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "split.json").read_text())
    return found


@pytest.fixture(scope="module")
def expected(once: Once) -> dict[str, Any]:
    """What one process writes."""

    def alone(folder: Path) -> dict[str, Any]:
        split.train(folder, 1)
        return trained(folder)

    found: dict[str, Any] = once("tensor-parallel", alone)
    return found


@pytest.mark.slow
@alike("processes", [2, 4], first=1, ids=["tensor_parallel", "beside_fsdp"])
def test_losses_and_gradient_norms_are_those_of_one_process(
    tmp_path: Path, processes: int, expected: dict[str, Any]
) -> None:
    run_on_ranks(split.train, tmp_path, 2, processes=processes, modules=split.MODULES)
    found = trained(tmp_path)
    losses, norms = zip(*found["losses"])
    expected_losses, expected_norms = zip(*expected["losses"])
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert found["again"] == losses[split.SAVED + 1]

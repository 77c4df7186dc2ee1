"""`prepare_pippy`: one model over several processes computes what it computes in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import prepare_pippy
from bigmodel.compat.inference import balanced_split_points
from bigmodel.errors import TrainError
from bigmodel.train.state.partial import PartialState
from tests.train.multiprocess import on_ranks, run_on_ranks


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(width) for width in widths)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "sums": x.sum(-1), "none": None}


def tokens(rows: int) -> torch.Tensor:
    return torch.arange(rows * 5).view(rows, 5) % 16


def in_one_process(model: nn.Module, batch: torch.Tensor, rows: int = 1) -> dict[str, torch.Tensor | None]:
    """Return what a whole model computes of a batch in micro-batches of so many rows.

    Products of more rows may have other last bits: processors choose their kernels by the number of rows.
    """
    with torch.no_grad():
        outputs = [model(part) for part in batch.split(rows)]
    found = {name: [each[name] for each in outputs] for name in outputs[0]}
    return {name: None if values[0] is None else torch.cat(values) for name, values in found.items()}


def test_stages_hold_nearly_the_same_bytes() -> None:
    assert balanced_split_points(Network(8, 8, 8, 8), 2) == ["layers.2"]
    assert balanced_split_points(Network(8, 8, 8, 80), 2) == ["layers.3"]
    assert balanced_split_points(Network(80, 8, 8, 8), 3) == ["layers.0", "layers.1"]
    assert balanced_split_points(Network(8, 8), 1) == []
    assert balanced_split_points(Network(8), 2, ["Layer"]) == ["layers.0"]
    with pytest.raises(TrainError, match="Network has 2 parts that a stage may begin with: 3 stages need as many"):
        balanced_split_points(Network(8), 3)


class TwoInputs(Network):
    """Looks up two inputs, the second after a layer, as a decoder does after its encoder."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.other = nn.Embedding(64, 8)
        self.last = nn.ModuleList([Layer(width)])

    def forward(self, ids: torch.Tensor, scale: float = 1.0, others: Any = None) -> dict[str, torch.Tensor | None]:
        x = self.layers[1](self.layers[0](self.embed(ids)))
        return {"hidden": self.last[0](self.other(others) + x * scale)}


def test_no_stage_begins_with_an_embedding() -> None:
    """It is called with an input of the model: what other layers have computed would not be handed on."""
    assert balanced_split_points(TwoInputs(8), 2) == ["layers.1"]
    with pytest.raises(TrainError, match="TwoInputs has 4 parts that a stage may begin with"):
        balanced_split_points(TwoInputs(8), 5)


@pytest.mark.slow
@on_ranks
def test_positional_arguments_are_in_the_order_of_the_example() -> None:
    inputs = {"ids": tokens(2), "others": tokens(2) + 1}
    with torch.no_grad():
        expected = TwoInputs(8)(**inputs)["hidden"]
    model = prepare_pippy(TwoInputs(8), example_kwargs=inputs, gather_output=True)
    assert torch.equal(model(*inputs.values())["hidden"], expected)
    assert torch.equal(model(**inputs)["hidden"], expected)
    assert torch.equal(model(inputs["ids"], others=inputs["others"])["hidden"], expected)


def test_in_one_process_the_model_stays_as_it_is() -> None:
    model = Network(8, 8)
    forward = model.forward
    assert prepare_pippy(model, example_args=(tokens(1),)) is model
    assert model.forward == forward
    assert model.hf_split_points == []


@on_ranks
@pytest.mark.slow
def test_the_last_process_has_the_output_of_batches_of_any_size() -> None:
    expected = Network(8, 8, 8)
    model = prepare_pippy(Network(8, 8, 8), example_args=(tokens(2),))
    assert model.hf_split_points == ["layers.1"]
    last = PartialState().is_last_process
    with torch.no_grad():
        for rows in (2, 4, 5, 1):
            found = model(tokens(rows))
            assert (found is not None) == last
            assert found is None or torch.equal(found["sums"], in_one_process(expected, tokens(rows), 2)["sums"])
        longer = torch.zeros(3, 7, dtype=torch.long)
        found = model(longer)
        assert found is None or torch.equal(found["hidden"], in_one_process(expected, longer, 2)["hidden"])


@pytest.mark.slow
@on_ranks
def test_every_process_has_it_if_asked() -> None:
    model = prepare_pippy(Network(8, 8), ["layers.0"], example_kwargs={"ids": tokens(1)}, gather_output=True)
    with torch.no_grad():
        found = model(ids=tokens(3))
    assert torch.equal(found["sums"], in_one_process(Network(8, 8), tokens(3))["sums"])
    assert found["none"] is None


@on_ranks
def test_as_many_split_points_as_processes_need() -> None:
    with pytest.raises(TrainError, match="split_points has 2 names, but 2 processes run 2 stages: give 1"):
        prepare_pippy(Network(8, 8, 8), ["layers.1", "layers.2"], example_args=(tokens(1),))


@on_ranks
def test_a_stage_may_begin_within_a_part_but_not_where_there_are_no_weights() -> None:
    chain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    for parameter in chain.parameters():
        nn.init.constant_(parameter, 0.5)
    expected = chain(x)
    assert torch.equal(prepare_pippy(chain, ["0.1"], ["Sequential"], gather_output=True)(x), expected)
    with pytest.raises(TrainError, match=r"split_points: 'layers\.5' is no module that holds weights"):
        prepare_pippy(Network(8, 8), ["layers.5"])


@on_ranks
def test_a_stage_cannot_begin_where_it_needs_more_than_it_is_called_with() -> None:
    model = prepare_pippy(Network(8, 8), ["layers.0.down"], ["Layer"], num_chunks=1)
    if not PartialState().is_last_process:
        assert model(tokens(2)) is None
        return
    with pytest.raises(TrainError, match=r"Network gives layers\.1 tensors that a stage before 1 computes"):
        model(tokens(2))


class WithEarly(Network):
    """Returns what an early layer computes, too."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        early = self.embed(ids)
        return {"hidden": self.layers[1](self.layers[0](early)), "early": early}


@on_ranks
def test_what_a_stage_is_given_may_be_used_again_and_returned() -> None:
    expected = in_one_process(WithEarly(8, 8), tokens(2))
    model = prepare_pippy(WithEarly(8, 8), ["layers.0"], gather_output=True)
    found = model(tokens(2))
    assert torch.equal(found["hidden"], expected["hidden"])
    assert torch.equal(found["early"], expected["early"])


@on_ranks
def test_what_it_is_not_given_is_an_error() -> None:
    model = prepare_pippy(WithEarly(8, 8), ["layers.1"], num_chunks=1)
    if not PartialState().is_last_process:
        assert model(tokens(2)) is None
        return
    with pytest.raises(TrainError, match="WithEarly returns tensors that a stage before 1 computes"):
        model(tokens(2))


class Looks(Network):
    """Decides by what its first layer computes."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        x = self.embed(ids)
        if x.sum() > 0:
            x = -x
        return {"hidden": self.layers[0](x)}


@on_ranks
def test_decisions_by_what_other_stages_compute_are_an_error() -> None:
    model = prepare_pippy(Looks(8), ["layers.0"], num_chunks=1)
    if not PartialState().is_last_process:
        assert model(tokens(2)) is None
        return
    with pytest.raises(TrainError, match="Looks looks, between its parts, at values that a stage before 1 computes"):
        model(tokens(2))


class Shared(Network):
    """Reads its first weight again at the end, as tied heads do, and calls a layer twice."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        x = self.layers[1](self.layers[0](self.embed(ids)))
        return {"hidden": self.layers[0](x), "logits": x @ self.embed.weight.T}


@on_ranks
def test_weights_of_an_earlier_stage_may_be_used_again() -> None:
    expected = in_one_process(Shared(8, 8), tokens(2))
    found = prepare_pippy(Shared(8, 8), ["layers.1"], gather_output=True)(tokens(2))
    assert torch.equal(found["hidden"], expected["hidden"])
    assert torch.equal(found["logits"], expected["logits"])


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 32}


def same_as_whole(kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    elif kind == "bert":
        made = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    else:
        config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        made = transformers.T5ForConditionalGeneration(config)
    whole = made.eval()
    ids = torch.randint(1, 32, (3, 6))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "t5":
        inputs["decoder_input_ids"] = ids[:, :4]
    with torch.no_grad():
        expected = whole(**inputs, use_cache=False).logits if kind != "bert" else whole(**inputs).logits
    model = prepare_pippy(whole, example_kwargs=inputs)
    found = model(**inputs)
    assert (found is not None) == PartialState().is_last_process
    assert found is None or torch.equal(found.logits, expected)
    smaller = model(**{name: tensor[:2] for name, tensor in inputs.items()})
    assert smaller is None or smaller.logits.shape == expected[:2].shape


@pytest.mark.slow  # imports transformers in two processes
@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
def test_models_of_transformers_compute_what_they_compute_whole(kind: str) -> None:
    pytest.importorskip("transformers")
    run_on_ranks(same_as_whole, kind, modules=("transformers",))

"""Values of fake tensors: which are known, and what is taken for those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence

from bigmodel.profile import profile_model
from bigmodel.profile.trace.branches import Answers
from bigmodel.profile.trace.recorder import Recorder
from bigmodel.profile.trace.values import UnknownValue, Values, read_as_real, reading, real_tensors


@contextmanager
def dry(assumed: bool = True) -> Iterator[Values]:
    """Operations within run on fake tensors."""
    values = Values(Answers(assumed))
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder(iter(()), values):
        yield values


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape).to(dtype)


def test_results_computed_from_constants_have_values() -> None:
    with dry():
        ids = torch.arange(6).reshape(2, 3)
        assert ids.sum().item() == 15
        assert (ids == 4).nonzero().tolist() == [[1, 1]]
        assert ids[ids > 2].tolist() == [3, 4, 5]
        assert torch.repeat_interleave(ids[0], ids[0]).shape == (3,)
        assert torch.equal(ids, ids.clone())


def test_computing_values_leaves_the_number_of_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives it to threads that begin meanwhile, for good."""
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    with dry():
        assert torch.arange(6).sum().item() == 15
    assert given == []


def test_a_mask_of_known_value_selects_from_an_unknown_tensor() -> None:
    with dry():
        hidden, mask = unknown(2, 3, 8), torch.tensor([[True, False, True], [False, False, True]])
        assert hidden[mask].shape == (3, 8)
        assert hidden.masked_select(mask.unsqueeze(-1)).shape == (24,)


def test_a_mask_of_unknown_value_selects_everything() -> None:
    with dry():
        mask = unknown(2, 3) > 0
        assert mask.nonzero().shape == (6, 2)
        assert unknown(2, 3, 8)[mask].shape == (6, 8)


def test_packed_sequences_are_as_long_as_is_known_and_have_no_padding_else() -> None:
    with dry():
        x, lengths = unknown(2, 5, 8), torch.tensor([4, 2])
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        assert (packed.data.shape, packed.batch_sizes.tolist()) == ((6, 8), [2, 2, 1, 1])
        packed = pack_padded_sequence(x.transpose(0, 1), unknown(2, dtype=torch.long))
        assert (packed.data.shape, packed.batch_sizes.tolist()) == ((10, 8), [2] * 5)


@pytest.mark.parametrize("assumed", [True, False])
def test_a_condition_of_unknown_value_has_the_assumed_value(assumed: bool) -> None:
    with dry(assumed):
        assert bool((unknown(3) > 0).any()) is assumed


def test_a_number_counted_from_a_mask_of_unknown_value_counts_all_of_it() -> None:
    with dry():
        present = (unknown(4, 8) == 0).sum(-1) != 8
        assert present.view(2, 2).sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_counted_from_choices_are_those_of_equal_choices(dim: int) -> None:
    """As mixtures of experts do that split their tokens by expert."""
    with dry():
        logits = unknown(5, 4) if dim else unknown(4, 5)
        chosen = logits.topk(2, dim).indices
        gates = torch.zeros(logits.shape).scatter(dim, chosen, 1)
        counts = gates.long().sum(1 - dim)
        assert counts.tolist() == [5, 5, 0, 0]
        assert [len(part) for part in unknown(10, 3).split(counts.tolist())] == [5, 5, 0, 0]


def test_an_expert_gets_each_token_at_most_once() -> None:
    """As mixtures of experts do that look up the tokens of one expert after another."""
    with dry():
        masks = torch.nn.functional.one_hot(unknown(5, 4).topk(2).indices, 4).permute(2, 1, 0)
        assert [len(torch.where(masks[expert])[1]) for expert in range(4)] == [5, 5, 0, 0]
        assert (masks.sum((1, 2)) > 0).nonzero().tolist() == [[0], [1], [2], [3]]


def test_integers_written_into_new_memory_are_known() -> None:
    with dry():
        offsets = torch.empty(3, dtype=torch.int64)
        offsets[0] = 0
        offsets[1:] = torch.tensor([4, 9])
        assert offsets.tolist() == [0, 4, 9]


@pytest.mark.usefixtures("accelerators")
def test_an_operation_that_the_host_lacks_has_an_unknown_value() -> None:
    with dry(), pytest.raises(UnknownValue):
        torch.histc(torch.arange(4, dtype=torch.int32, device="virtual:0"), 4, 0, 3)[0].item()


def test_a_number_of_unknown_value_cannot_be_read() -> None:
    with dry(), pytest.raises(UnknownValue, match="float32"):
        unknown(3).sum().item()


@pytest.mark.parametrize(
    "write", [lambda known, other: known.copy_(other), lambda known, other: known[0].add_(other[0])]
)
def test_a_write_of_unknown_values_makes_a_tensor_unknown(
    write: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    with dry():
        known = torch.arange(3)
        seen_elsewhere = known.view(3)
        write(known, unknown(3, dtype=torch.int64))
        with pytest.raises(UnknownValue):
            seen_elsewhere.sum().item()


def test_results_whose_size_depends_on_values_keep_the_storage_that_their_kernel_took() -> None:
    """`unique_consecutive` allocates as many elements as it reads."""
    with dry():
        found = torch.unique_consecutive(torch.tensor([0, 0, 4, 4, 4, 9]))
    assert found.shape == (3,)
    assert found.untyped_storage().nbytes() == 6 * 8


def test_models_of_transformers_read_masks_of_a_dry_run_as_real_ones() -> None:
    """With a mask of ones an encoder makes no larger one."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, ids = BertModel(BertConfig(**sizes, vocab_size=32)).eval(), torch.ones(2, 64, dtype=torch.long)

    def activations(mask: torch.Tensor) -> int:
        return profile_model(model, sample_inputs={"input_ids": ids, "attention_mask": mask}).activations

    padded = torch.ones_like(ids).index_fill(1, torch.tensor([63]), 0)
    assert activations(torch.ones_like(ids)) < activations(padded)


def test_random_numbers_are_unknown_and_not_drawn() -> None:
    state = torch.get_rng_state()
    with dry(), pytest.raises(UnknownValue):
        torch.randint(3, (2,)).sum().item()
    assert torch.equal(torch.get_rng_state(), state)


def test_constants_may_move_to_an_accelerator(accelerators: None) -> None:
    with dry():
        assert torch.tensor(7).to("virtual:0").item() == 7


class Counting(Values):
    """Values that count the operations they run."""

    ran = 0

    def run(self, *args: Any) -> Any:
        self.ran += 1
        return super().run(*args)


@contextmanager
def read_values(values: Values) -> Iterator[None]:
    with ExitStack() as stack:
        for each in (read_as_real(), FakeTensorMode(), Recorder(iter(()), values), reading(values)):
            stack.enter_context(each)
        yield


def test_known_numbers_are_listed_without_an_operation_for_each() -> None:
    values = Counting()
    with read_values(values):
        ids = torch.zeros(3, 200, dtype=torch.long)
        with real_tensors():
            known = torch.arange(600).reshape(3, 200)
        values.give(ids, known)
        before = values.ran
        assert ids.tolist() == known.tolist()
        assert ids[1, :2].tolist() == [200, 201]
        assert values.ran - before == 2  # those of the slices


def test_unknown_numbers_are_not_listed() -> None:
    values = Values()
    with read_values(values):
        unknown = torch.empty(3)
        with pytest.raises(UnknownValue):
            unknown.tolist()
        written = torch.zeros(3)
        written.copy_(unknown)
        with pytest.raises(UnknownValue):
            written.tolist()


def test_what_is_replaced_is_put_back_when_the_last_dry_run_ends() -> None:
    before = FakeTensor.tolist
    with read_as_real():
        with read_as_real():
            pass
        assert FakeTensor.tolist is not before
    assert FakeTensor.tolist is before

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from bigmodel.devices.move import copied_out_of, send_to_device
from bigmodel.devices.storage import storage_of

from ..accelerators import at

pytestmark = pytest.mark.usefixtures("accelerators")

Pair = namedtuple("Pair", "left right")
THERE = "virtual:0"


@dataclass
class Batch:
    ids: torch.Tensor
    note: str


def test_every_container_is_rebuilt_with_its_tensors_moved() -> None:
    x = torch.ones(2)
    value = {"a": [x, (x, 3)], "b": Pair(x, "text"), "c": Batch(x, "note"), "d": OrderedDict(e=x)}
    moved = send_to_device(value, THERE)
    assert str(moved["a"][0].device) == str(moved["a"][1][0].device) == THERE
    assert isinstance(moved["b"], Pair)
    assert (str(moved["b"].left.device), moved["b"].right) == (THERE, "text")
    assert (str(moved["c"].ids.device), moved["c"].note) == (THERE, "note")
    assert isinstance(moved["d"], OrderedDict)
    assert value["c"].ids is x


def test_model_outputs_keep_their_class() -> None:
    moved = send_to_device(BaseModelOutput(last_hidden_state=torch.ones(2)), THERE)
    assert isinstance(moved, BaseModelOutput)
    assert str(moved.last_hidden_state.device) == str(moved["last_hidden_state"].device) == THERE


def test_what_is_in_place_comes_back_as_the_same_object() -> None:
    value = {"a": [torch.ones(1, device=THERE)], "b": (None, 1, "x")}
    assert send_to_device(value, THERE) is value


def test_skipped_keys_stay_where_they_are() -> None:
    moved = send_to_device({"a": torch.ones(1), "cache": torch.ones(1)}, THERE, skip_keys="cache")
    assert str(moved["a"].device) == THERE
    assert str(moved["cache"].device) == "cpu"


def test_an_object_that_can_move_itself_does() -> None:
    class Encoding:
        device = None

        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    assert send_to_device([Encoding()], THERE) == ["moved to virtual:0"]


@pytest.mark.usefixtures("accelerators")
def test_a_packed_sequence_moves_as_it_knows_it_may() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 8), [3, 2])
    moved = send_to_device((packed,), at(0))[0]
    assert type(moved) is type(packed)
    assert (str(moved.data.device), str(moved.batch_sizes.device)) == (at(0), "cpu")


def test_tensors_are_copied_out_of_one_memory_and_others_left() -> None:
    slab, other = torch.zeros(16), torch.zeros(4)
    value = {"part": slab[2:6], "deep": [(slab[8:], other)], "number": 3}
    found = copied_out_of(value, storage_of(slab))
    slab.fill_(1)
    assert found["part"].tolist() == [0] * 4
    assert found["deep"][0][0].tolist() == [0] * 8
    assert found["deep"][0][1] is other
    untouched = [other, "text"]
    assert copied_out_of(untouched, storage_of(slab)) is untouched

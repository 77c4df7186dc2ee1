"""Which modules are best kept in full precision, and which are of bitsandbytes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from bigmodel.utils import bnb


class Headed(nn.Module):
    base_model_prefix = "body"

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 4, bias=False)
        if ties:
            self.head.weight = self.body[0].weight


class Base(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_the_head_stays_and_what_shares_its_weights() -> None:
    assert bnb.get_keys_to_not_convert(Headed(ties=False)) == ["head"]
    assert set(bnb.get_keys_to_not_convert(Headed(ties=True))) == {"head", "body.0"}
    assert bnb.get_keys_to_not_convert(Base()) == []


def test_the_device_is_that_of_the_first_parameter() -> None:
    assert bnb.get_parameter_device(nn.Linear(1, 1, device="meta")) == torch.device("meta")


def test_layers_of_4_bits_are_known_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear4bit(nn.Linear):
        pass

    for name in ("bitsandbytes", "bitsandbytes.nn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", SimpleNamespace(Linear4bit=Linear4bit))
    assert bnb.has_4bit_bnb_layers(nn.Sequential(Linear4bit(1, 1)))
    assert not bnb.has_4bit_bnb_layers(nn.Sequential(nn.Linear(1, 1)))

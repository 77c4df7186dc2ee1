"""Patterns that are compiled on first use do what compiled ones do."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from transformers import core_model_loading
from transformers.core_model_loading import WeightRenaming, rename_source_key

from bigmodel.sources.lazy_patterns import LazyPattern, compiled_later


def test_a_pattern_is_used_like_a_compiled_one() -> None:
    lazy, compiled = LazyPattern(r"(?P<layer>\d+)\.a"), re.compile(r"(?P<layer>\d+)\.a")
    assert lazy.search("x.12.a").span() == compiled.search("x.12.a").span()  # type: ignore[union-attr]
    assert lazy.groupindex == compiled.groupindex
    assert copy.deepcopy(lazy) is lazy
    assert pickle.loads(pickle.dumps(lazy)) == compiled


def test_it_is_compiled_when_it_is_used() -> None:
    wrong = LazyPattern("(")
    with pytest.raises(re.error):
        wrong.search("")


def test_rules_rename_as_before() -> None:
    with compiled_later():
        rules = [WeightRenaming(r"\.old\.", ".new."), WeightRenaming(r"^(\w+)_x", r"\1_y")]
        assert isinstance(rules[0].compiled_sources, LazyPattern)
    assert core_model_loading.re is re
    assert rename_source_key("a.old.weight", rules, [])[0] == "a.new.weight"
    assert rename_source_key("a_x.weight", rules, [])[0] == "a_y.weight"

from __future__ import annotations

import json

import pytest

from bigmodel.profile.unique_keys import DuplicateKeyError, once_each


def test_an_object_whose_keys_differ_is_a_dictionary() -> None:
    text = '{"a": {"a": 1}, "b": [{"a": 2}, {}]}'
    assert json.loads(text, object_pairs_hook=once_each) == json.loads(text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 1}', '{"b": [{"a": 1, "a": 2}]}', '{"\\u0061": 1, "a": 2}'])
def test_a_key_that_is_there_twice_is_named(text: str) -> None:
    with pytest.raises(DuplicateKeyError) as refused:
        json.loads(text, object_pairs_hook=once_each)
    assert refused.value.key == "a"

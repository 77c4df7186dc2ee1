from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError
from bigmodel.sources.index import (
    DuplicateKeyError,
    choose_checkpoint_file,
    find_checkpoint_file,
    merge_weight_map,
    once_each,
    parse_index,
    read_index,
)


def write_index(folder: Path, content: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_an_index_maps_tensors_to_files(tmp_path: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "sub/two.safetensors"}
    assert read_index(write_index(tmp_path, {"metadata": {}, "weight_map": weight_map})) == weight_map


@pytest.mark.parametrize("content", ["{", "[]", "3", "{}", '{"weight_map": []}', '{"weight_map": null}', ""])
def test_what_is_no_index_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors\.index\.json: (is not JSON|holds no)"):
        read_index(write_index(tmp_path, content))


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "sub/../../evil.safetensors",
        "/etc/passwd",
        "..",
        "..\\evil.safetensors",
        "C:\\evil.safetensors",
        "C:evil.safetensors",
        "\\\\server\\share\\evil.safetensors",
    ],
)
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = write_index(tmp_path, {"weight_map": {"a.weight": name}})
    with pytest.raises(CheckpointFormatError, match=r"'a\.weight' is in the file .*outside the checkpoint's folder"):
        read_index(path)


@pytest.mark.parametrize("name", ["", None, 3, ["a"], {"a": 1}, "a\0b"])
def test_what_is_no_file_name_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(CheckpointFormatError, match=r"places 'a\.weight' in the file .* no file name"):
        read_index(write_index(tmp_path, {"weight_map": {"a.weight": name}}))


@pytest.mark.parametrize("content", ['{"weight_map": {"a": "x", "a": "y"}}', '{"weight_map": {}, "a": 1, "a": 2}'])
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointFormatError, match=r"index\.json: names 'a' twice"):
        read_index(write_index(tmp_path, content))


NAMES = st.sampled_from(["a", "b", "a:b", 'a":"b', "\\u0061", "\\ud800", "é"])
FILES = st.sampled_from(["x.safetensors", "part:1.safetensors", "\\u0078.safetensors"])
SPACES = st.sampled_from(["", " ", "\n\t"])


@st.composite
def texts(draw: st.DrawFn) -> str:
    """An index as text, whose keys may be there twice and whose strings may hold colons."""
    pairs = draw(st.lists(st.tuples(NAMES, FILES, SPACES), max_size=4))
    members = [f'"{name}"{space}:{space}"{file}"' for name, file, space in pairs if '"' not in name]
    more = draw(
        st.lists(
            st.sampled_from(['"metadata": {"total_size": 3}', '"n": [{"a": 1, "a": 2}]', '"m": 1e999']), max_size=2
        )
    )
    return (
        "{"
        + ", ".join([*more, f'"weight_map": {{{", ".join(members)}}}'])
        + draw(st.sampled_from(["}", "}", "} x", ""]))
    )


@given(texts())
def test_the_fast_parser_takes_and_refuses_what_the_plain_one_does(text: str) -> None:
    def plainly() -> object:
        return json.loads(text, object_pairs_hook=once_each)["weight_map"]

    try:
        expected = plainly()
    except DuplicateKeyError as error:
        with pytest.raises(CheckpointFormatError, match=re.escape(f"names {error.key!r} twice")):
            parse_index(text.encode(), "index")
    except ValueError:
        with pytest.raises(CheckpointFormatError, match="is not JSON"):
            parse_index(text.encode(), "index")
    else:
        assert parse_index(text.encode(), "index") == expected


def test_an_index_may_be_the_map_itself(tmp_path: Path) -> None:
    assert read_index(write_index(tmp_path, {"a": "part1.bin", "b": "part2.bin"})) == {
        "a": "part1.bin",
        "b": "part2.bin",
    }


def test_a_folder_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no such file"):
        read_index(tmp_path)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"none\.index\.json"):
        read_index(tmp_path / "none.index.json")


def test_the_index_must_agree_with_its_shards() -> None:
    headers = {"one": ["a"], "two": ["b"]}
    assert merge_weight_map(headers, {"a": "one", "b": "two"}, "index") == {"a": "one", "b": "two"}
    with pytest.raises(CheckpointFormatError, match="index: says that 'b' is in one, which holds no such tensor"):
        merge_weight_map(headers, {"a": "one", "b": "one"}, "index")


def test_a_tensor_the_index_forgot_counts_unless_two_shards_hold_it() -> None:
    assert merge_weight_map({"one": ["a", "b"]}, {"a": "one"}, "index") == {"a": "one", "b": "one"}
    with pytest.raises(CheckpointFormatError, match="'b' is in one and in two"):
        merge_weight_map({"one": ["a", "b"], "two": ["b"]}, {"a": "one"}, "index")
    assert merge_weight_map({"one": ["a"], "two": ["a"]}, {"a": "two"}, "index") == {"a": "two"}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"], "model.safetensors"),
        (
            ["model.safetensors.index.json", "model-1.safetensors", "adapter.safetensors"],
            "model.safetensors.index.json",
        ),
        (["my.safetensors.index.json", "a.safetensors", "b.safetensors"], "my.safetensors.index.json"),
        (["weights.safetensors", "pytorch_model.bin"], "weights.safetensors"),
        (["pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.bin"], "pytorch_model.bin"),
        (["pytorch_model.bin.index.json", "pytorch_model-1.bin"], "pytorch_model.bin.index.json"),
        (["part1.bin", "part2.bin", "weight_map.index.json"], "weight_map.index.json"),
        (["weights.bin", "config.json"], "weights.bin"),
        (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
        (["model-00001-of-00002.safetensors", "mine.safetensors"], "mine.safetensors"),
        (["model-00001-of-00002.safetensors", "pytorch_model.bin"], "pytorch_model.bin"),
    ],
)
def test_the_file_to_open_is_chosen_as_transformers_does(names: list[str], chosen: str) -> None:
    assert choose_checkpoint_file(names, "folder") == chosen


def test_several_files_without_an_index_are_refused() -> None:
    with pytest.raises(CheckpointFormatError, match=r"folder: holds a\.safetensors, b\.safetensors and no model"):
        choose_checkpoint_file(["b.safetensors", "a.safetensors"], "folder")
    with pytest.raises(CheckpointFormatError, match=r"1\.safetensors\.index\.json, 2\.safetensors\.index\.json"):
        choose_checkpoint_file(["1.safetensors.index.json", "2.safetensors.index.json"], "folder")
    with pytest.raises(CheckpointFormatError, match=r"folder: holds model-00001-of-00002\.safetensors and no model"):
        choose_checkpoint_file(["model-00001-of-00002.safetensors"], "folder")


def test_a_file_is_taken_at_its_word_and_a_folder_searched(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.touch()
    (tmp_path / ".b.safetensors").touch()
    (tmp_path / "config.json").touch()
    assert find_checkpoint_file(file) == file
    assert find_checkpoint_file(tmp_path) == file
    with pytest.raises(CheckpointFormatError, match=r"config\.json: is neither"):
        find_checkpoint_file(tmp_path / "config.json")
    with pytest.raises(CheckpointNotFoundError, match="no such folder or file"):
        find_checkpoint_file(tmp_path / "none")


def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        find_checkpoint_file(tmp_path)


def test_an_object_whose_keys_differ_is_a_dictionary() -> None:
    text = '{"a": {"a": 1}, "b": [{"a": 2}, {}]}'
    assert json.loads(text, object_pairs_hook=once_each) == json.loads(text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 1}', '{"b": [{"a": 1, "a": 2}]}', '{"\\u0061": 1, "a": 2}'])
def test_a_key_that_is_there_twice_is_named(text: str) -> None:
    with pytest.raises(DuplicateKeyError) as refused:
        json.loads(text, object_pairs_hook=once_each)
    assert refused.value.key == "a"

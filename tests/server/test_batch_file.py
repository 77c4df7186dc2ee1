"""Files of prompts and of answers: what a line may say, and how a run goes on where another ended."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from bigmodel.errors import ServeError
from bigmodel.server import Generation
from bigmodel.server.batch_file import MOST_BYTES, PromptFile, PromptLine, answers_in
from bigmodel.server.engine import SamplingParams
from bigmodel.server.text.codec import TextCodec

from .tiny import tiny_tokenizer

DEFAULT = SamplingParams(16, temperature=0.0)
ANSWER = Generation("café\n", (5, 6), "stop", 3)


def prompts(folder: Path, *lines: Any) -> PromptFile:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return PromptFile(path)


def test_a_prompt_is_a_text_or_tokens_or_messages(tmp_path: Path) -> None:
    codec = TextCodec(tiny_tokenizer())
    messages = [{"role": "user", "content": "hello"}]
    asked = prompts(tmp_path, {"prompt": "hello"}, {"prompt": [1, 2, 3]}, {"messages": messages})
    text, tokens, chat = (line.ids(codec) for _, line in asked)
    assert text == codec.encode("hello")
    assert tokens == [1, 2, 3]
    assert chat == codec.encode(codec.render_chat(messages), add_special_tokens=False)


def test_the_id_is_that_of_the_line_or_its_number(tmp_path: Path) -> None:
    asked = prompts(tmp_path, {"id": "a", "prompt": "x"}, "", {"prompt": "y"}, {"id": 7, "prompt": "z"})
    assert [name for name, _ in asked] == ["a", 3, 7]


def test_parameters_of_a_line_replace_those_of_the_command(tmp_path: Path) -> None:
    given = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "stop": ["."]}
    whole, part = (line for _, line in prompts(tmp_path, {"prompt": "x", **given}, {"prompt": "x", "stop": "!"}))
    assert whole.params(DEFAULT) == SamplingParams(3, 0.5, 0.9, 4, seed=1, stop=(".",))
    assert part.params(DEFAULT) == SamplingParams(16, 0.0, stop=("!",))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "line 2: Invalid JSON"),
        ("[1]", "line 2: Input should be an object"),
        ({}, "give either 'prompt' or 'messages'"),
        ({"prompt": "x", "messages": []}, "give either 'prompt' or 'messages'"),
        ({"prompt": 3}, "prompt.str"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens: Input should be a valid integer"),
        ('{"prompt": "x", "temperature": NaN}', "line 2"),
        ({"prompt": "x", "top_p": 2}, "top_p"),
        ({"prompt": "x", "logprobs": 3}, "logprobs: Extra inputs are not permitted"),
        ({"id": 1, "prompt": "x"}, "the id 1 occurs twice"),
        pytest.param(
            '{"prompt": "' + "x" * MOST_BYTES + '"}',
            f"more than {MOST_BYTES} bytes",
            marks=[pytest.mark.slow, pytest.mark.long],
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(ServeError, match=r"line 2") as caught:
        list(prompts(tmp_path, {"prompt": "fine"}, line))
    assert why in str(caught.value)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_and_errors_are_appended(tmp_path: Path) -> None:
    asked, path = prompts(tmp_path, {"prompt": "x"}, {"prompt": "y"}), tmp_path / "answers.jsonl"
    with answers_in(path, asked) as answers:
        answers.append(2, ANSWER)
        answers.append(1, ServeError("too long"))
        assert answers.done == {1, 2}
    first = {"id": 2, "text": "café\n", "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2}
    assert read(path) == [first, {"id": 1, "error": "too long"}]


def test_a_file_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    asked, path = prompts(tmp_path, {"prompt": "x"}, {"prompt": "y"}), tmp_path / "answers.jsonl"
    with answers_in(path, asked) as answers:
        answers.append(1, ANSWER)
        answers.append(2, ANSWER)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with answers_in(path, asked) as answers:
            done = set(answers.done)
            for name in {1, 2} - done:
                answers.append(name, ANSWER)
        assert len(done) == whole[:cut].count(b"\n")
        assert sorted(each["id"] for each in read(path)) == [1, 2]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"id": "other", "text": "x"}\n', "answers 'other', which is none of the prompts"),
        (b"notes of mine", "is no answer"),
        (b"[1]\n", "is no answer"),
        (b'{"id": [1]}\n', "is no answer"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(content)
    with pytest.raises(ServeError, match=why), answers_in(path, prompts(tmp_path, {"prompt": "x"})):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "known", "name"),
    [
        ({}, [], ""),
        ({}, ["legal"], "legal"),
        ({"adapter": ""}, ["legal"], ""),
        ({"adapter": "terse"}, ["legal", "terse"], "terse"),
    ],
)
def test_a_line_names_its_adapter_or_has_the_only_one(line: dict[str, str], known: list[str], name: str) -> None:
    assert PromptLine(prompt="x", **line).adapter_of(known) == name


@pytest.mark.parametrize(
    ("line", "known", "why"),
    [
        ({}, ["legal", "terse"], "it names no adapter; there are legal, terse"),
        ({"adapter": "x"}, ["legal", "terse"], "there is no adapter 'x'; there are legal, terse"),
        ({"adapter": "x"}, [], "there is no adapter 'x'; there are none"),
    ],
)
def test_a_line_without_a_known_adapter_is_refused(line: dict[str, str], known: list[str], why: str) -> None:
    with pytest.raises(ServeError, match=why):
        PromptLine(prompt="x", **line).adapter_of(known)


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(ServeError, match="another process writes it"),
            answers_in(path, prompts(tmp_path, {"prompt": "x"})),
        ):
            pass

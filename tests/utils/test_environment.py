from __future__ import annotations

import os
import socket

import pytest

from bigmodel.utils import environment


def test_variables_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_NUMBER", "1")
    monkeypatch.delenv("ANOTHER", raising=False)
    with pytest.raises(KeyError), environment.patch_environment(a_number=2, another="x"):
        assert (os.environ["A_NUMBER"], os.environ["ANOTHER"]) == ("2", "x")
        raise KeyError
    assert os.environ["A_NUMBER"] == "1"
    assert "ANOTHER" not in os.environ


def test_the_environment_is_cleared_and_restored() -> None:
    before = dict(os.environ)
    with environment.clear_environment():
        assert dict(os.environ) == {}
        os.environ["ANOTHER"] = "x"
    assert dict(os.environ) == before


def test_accelerate_variables_set_by_a_function_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_X", raising=False)

    @environment.purge_accelerate_environment
    class Tests:
        def run(self) -> str:
            os.environ["ACCELERATE_X"] = "1"
            return "done"

    assert Tests().run() == "done"
    assert "ACCELERATE_X" not in os.environ


def test_variables_are_read_as_flags_choices_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.setenv("LOW", "-1")
    assert environment.parse_flag_from_env("ONE") is True
    assert environment.parse_choice_from_env("ONE", "no") == "1"
    assert environment.parse_choice_from_env("NONE_SUCH") == "no"
    assert environment.get_int_from_env(["NONE_SUCH", "LOW", "ONE"], 7) == 1
    assert environment.get_int_from_env(["NONE_SUCH"], 7) == 7


def test_texts_are_parsed_as_booleans() -> None:
    assert [environment.str_to_bool(text) for text in ("yes", "On", "0", "f")] == [1, 1, 0, 0]
    assert environment.str_to_bool("true", to_bool=True) is True
    for text in ("perhaps", ""):
        with pytest.raises(ValueError, match="neither yes nor no"):
            environment.str_to_bool(text)


def test_imported_libraries_and_listening_ports_are_seen() -> None:
    assert environment.are_libraries_initialized("torch", "no_such_library") == ["torch"]
    assert environment.get_gpu_info()[1] == len(environment.get_gpu_info()[0])
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
        listener.listen()
        assert environment.is_port_in_use(port)
    assert not environment.is_port_in_use(port)

import os
import subprocess
import sys

import pytest

from bigmodel.devices.virtual.environment import from_environment
from bigmodel.errors import DeviceError


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("", None), ("2", (2, None, None)), ("1x3MB", (1, 3_000_000, None)), ("2x1GiB@8GB", (2, 2**30, 8 * 10**9))],
)
def test_the_variable_says_how_many_how_large_how_fast(
    text: str, meaning: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGMODEL_VIRTUAL", text)
    assert from_environment() == meaning


@pytest.mark.parametrize("text", ["many", "x1GiB", "-1"])
def test_another_form_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGMODEL_VIRTUAL", text)
    with pytest.raises(DeviceError, match="BIGMODEL_VIRTUAL"):
        from_environment()


@pytest.mark.slow
def test_a_process_started_with_it_has_the_accelerators() -> None:
    code = "from bigmodel.devices import accelerators, free_memory_bytes as free; print(accelerators(), free(0))"
    environment = {**os.environ, "BIGMODEL_VIRTUAL": "2x1MiB"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "['virtual:0', 'virtual:1'] 1048576"

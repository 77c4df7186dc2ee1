import pytest

from bigmodel.devices.virtual.environment import from_environment
from bigmodel.errors import DeviceError

from ..conftest import Ended


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
def test_a_process_started_with_it_has_the_accelerators(own_process: Ended) -> None:
    assert own_process.found["accelerators"] == ["virtual:0", "virtual:1"]
    assert own_process.found["free"] == 2**20

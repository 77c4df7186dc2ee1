import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.devices import format_size, parse_size
from bigmodel.errors import SizeError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("10GiB", 10 * 2**30),
        ("10GB", 10**10),
        ("10G", 10**10),
        ("512MiB", 512 * 2**20),
        ("512mb", 512 * 10**6),
        (" 1.5 KiB ", 1536),
        ("2T", 2 * 10**12),
        ("7B", 7),
        (42, 42),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("bad", ["", "GiB", "ten", "10 GiBs", "-1GB", -1, "1e9", True, None, 1.5, "1..5G", "٣G"])
def test_unreadable_sizes_are_refused_by_name(bad: object) -> None:
    with pytest.raises(SizeError, match="size"):
        parse_size(bad)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=2**62))
def test_large_whole_sizes_lose_no_byte(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(f"{nbytes // 1024}KiB") == nbytes // 1024 * 1024


@pytest.mark.parametrize("size", [2**63, "9" * 400 + "GiB", "9" * 400 + ".5", "1" + "0" * 10 + "TiB"])
def test_more_than_any_machine_has_is_refused(size: int | str) -> None:
    with pytest.raises(SizeError):
        parse_size(size)
    assert parse_size(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**41, "2.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text

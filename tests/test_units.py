from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import InputError
from elbowroom.units import MAX_BYTES, format_bytes, format_rate, format_seconds, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (17, 17),
        ("17", 17),
        ("8GiB", 8 * 2**30),
        ("6.5GB", 6_500_000_000),
        (" 1.5 kib ", 1536),
        ("1_000", 1000),
        ("1e3", 1000),
        ("0.5B", 0),
    ],
)
def test_bytes_are_parsed(text, count):
    assert parse_bytes(text) == count


def test_a_share_of_a_device():
    assert parse_bytes("90%", device_bytes=1000) == 900
    with pytest.raises(InputError, match="no device is known"):
        parse_bytes("90%")


@pytest.mark.parametrize(
    "bad", ["", "GiB", "-1", -1, "1e999", "8XB", "nan", 1.5, True, None, "9" * 99, MAX_BYTES + 1]
)
def test_nonsense_is_refused(bad):
    with pytest.raises(InputError, match=r"^budget: "):
        parse_bytes(bad)


@given(st.integers(0, MAX_BYTES))
def test_whole_numbers_survive(count):
    assert parse_bytes(str(count)) == count
    assert format_bytes(count).split()[1] in {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}


def test_formatting():
    assert format_bytes(1_610_612_736) == "1.5 GiB"
    assert format_bytes(1023) == "1023 B"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(2.5e-9) == "2.5 ns"
    assert format_rate(12e9) == "12 GB/s"
    assert format_rate(999e3) == "999 KB/s"
    assert format_rate(1) == "1 B/s"


@given(st.floats(1e3, 1e12))
def test_rates_that_are_printed_can_be_given(rate):
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    "bad", ["12GB", "12GB/h", "fast", "", "/s", "0", 0, -1, True, None, float("inf"), "90%/s", "-1GB/s"]
)
def test_rates_that_make_no_sense_are_refused(bad):
    with pytest.raises(InputError, match=r"^link: must be bytes per second such as '12GB/s', not "):
        parse_rate(bad)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host.quota import parse_cfs_quota, parse_cpu_max


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("max 100000\n", None), ("200000 100000\n", 2.0), ("1000 1000000\n", 0.001), ("765000 100000\n\0", 7.65)],
)
def test_what_the_kernel_writes_for_version_2(text: str, cpus: float | None) -> None:
    quota = parse_cpu_max(text)
    assert quota.cpus == cpus
    assert quota.problem == ""


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max", None),
        ("150000", 1.5),
        ("", None),
        ("0 100000", None),
        ("-1 100000", None),
        ("100000 0", None),
        ("max 0", None),
        ("100000 -100000", None),
        ("100000 max", None),
        ("1e5 100000", None),
        ("0x10 100000", None),
        ("١ 100000", None),
        ("1 2 3", None),
        ("9" * 400 + " 1", None),
        ("\0", None),
    ],
)
def test_what_the_kernel_does_not_write_for_version_2(text: str, cpus: float | None) -> None:
    quota = parse_cpu_max(text)
    assert quota.cpus == cpus
    assert quota.problem


@pytest.mark.parametrize(("quota", "cpus"), [("-1\n", None), ("50000\n", 0.5), ("400000\n", 4.0)])
def test_what_the_kernel_writes_for_version_1(quota: str, cpus: float | None) -> None:
    found = parse_cfs_quota(quota, "100000\n")
    assert found.cpus == cpus
    assert found.problem == ""


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [
        ("200000", None, 2.0),
        ("0", "100000", None),
        ("-2", "100000", None),
        ("max", "100000", None),
        ("", "100000", None),
        ("100000", "", None),
        ("100000", "0", None),
        ("-1", "0", None),
        ("1.5", "1", None),
    ],
)
def test_what_the_kernel_does_not_write_for_version_1(quota: str, period: str | None, cpus: float | None) -> None:
    found = parse_cfs_quota(quota, period)
    assert found.cpus == cpus
    assert found.problem


def test_no_quota_needs_no_period() -> None:
    assert parse_cfs_quota("-1", None) == (None, "")


words = st.sampled_from(["max", "-1", "0", "100000", "1e5", "", "\0", "9" * 30]) | st.text(max_size=6)


@given(st.lists(words, max_size=4).map(" ".join))
def test_any_text_for_version_2_is_a_positive_quota_or_none(text: str) -> None:
    quota = parse_cpu_max(text)
    assert quota.cpus is None or quota.cpus > 0


@given(words, st.none() | words)
def test_any_text_for_version_1_is_a_positive_quota_or_none(quota: str, period: str | None) -> None:
    found = parse_cfs_quota(quota, period)
    assert found.cpus is None or found.cpus > 0


@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_a_quota_is_its_microseconds_over_the_period(quota: int, period: int) -> None:
    assert parse_cpu_max(f"{quota} {period}\n") == parse_cfs_quota(f"{quota}\n", f"{period}\n") == (quota / period, "")

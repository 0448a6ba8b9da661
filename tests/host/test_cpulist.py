from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host.cpulist import MAX_CPUS, format_cpulist, parse_cpulist, parse_cpumask

cpu_sets = st.frozensets(st.integers(0, 700))


def as_mask(cpus: frozenset[int], width: int) -> str:
    """What the kernel's %*pb prints for a bitmap of ``width`` bits."""
    bits = sum(1 << cpu for cpu in cpus)
    words = [f"{bits >> 32 * i & 0xFFFFFFFF:08x}" for i in reversed(range(-(-width // 32)))]
    first = (width % 32 or 32) // 4 + ((width % 32 or 32) % 4 > 0)
    return ",".join([words[0][-first:], *words[1:]])


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", []),
        ("\n", []),
        ("0\n", [0]),
        ("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]),
        ("5-5", [5]),
        ("0-1\n\0", [0, 1]),
        ("3,1,2", [1, 2, 3]),
    ],
)
def test_a_list_is_parsed_as_the_kernel_prints_it(text: str, cpus: list[int]) -> None:
    assert parse_cpulist(text) == set(cpus)


@pytest.mark.parametrize(
    "text", ["-1", "1-", "a", "1,,2", "3-1", "(null)", "0-3:1/2", "1 2", "٣", f"0-{MAX_CPUS}", "9" * 5000]
)
def test_a_list_that_the_kernel_cannot_print_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="CPU list"):
        parse_cpulist(text)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("1\n", [0]),
        ("00000000,00000400\n", [10]),
        ("0000,00000000,00000000,0000ffff", list(range(16))),
        ("80000000,00000001\n\0", [0, 63]),
        ("0", []),
        ("FF", list(range(8))),
        ("000000ff,ff000000", list(range(24, 40))),
    ],
)
def test_a_mask_is_parsed_as_the_kernel_prints_it(text: str, cpus: list[int]) -> None:
    assert parse_cpumask(text) == set(cpus)


@pytest.mark.parametrize(
    "text", ["", "\n", "g", "ff,ff", "1,000000000", ",00000001", "-1", "0x1", "f" * (MAX_CPUS // 4 + 1)]
)
def test_a_mask_that_the_kernel_cannot_print_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="CPU mask"):
        parse_cpumask(text)


@given(cpu_sets)
def test_a_list_that_is_printed_and_parsed_is_the_same_set(cpus: frozenset[int]) -> None:
    assert parse_cpulist(format_cpulist(cpus)) == cpus


@given(cpu_sets, st.integers(701, 1100))
def test_a_mask_of_any_width_is_the_same_set(cpus: frozenset[int], width: int) -> None:
    assert parse_cpumask(as_mask(cpus, width) + "\n") == cpus


@given(cpu_sets)
def test_a_printed_list_is_as_short_as_it_can_be(cpus: frozenset[int]) -> None:
    ranges = format_cpulist(cpus).count(",") + 1 if cpus else 0
    assert ranges == sum(cpu - 1 not in cpus for cpu in cpus)


@given(st.text(alphabet="0123456789-,x \n\0af", max_size=30))
def test_parsers_return_a_set_or_refuse(text: str) -> None:
    for parse in (parse_cpulist, parse_cpumask):
        try:
            cpus = parse(text)
        except ValueError:
            continue
        assert all(0 <= cpu < MAX_CPUS for cpu in cpus)

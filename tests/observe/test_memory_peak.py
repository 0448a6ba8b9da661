"""The most memory that a process has held, its own and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadmaster.observe.memory import peak_rss

MIB = 1 << 20


def numbers_of(code: str) -> list[int]:
    """Run ``code`` in a fresh process and return the numbers that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.processes
def test_the_peak_counts_what_was_held_and_given_back() -> None:
    code = """
from loadmaster.observe.memory import peak_rss
before = peak_rss()
block = bytearray(64 << 20)
block[::4096] = bytes(len(block) // 4096)
held = peak_rss()
del block
print(before, held, peak_rss())
"""
    before, held, after = numbers_of(code)
    assert held - before == pytest.approx(64 * MIB, abs=2 * MIB)
    assert after == pytest.approx(held, abs=2 * MIB)


@pytest.mark.processes
def test_the_peak_of_the_process_that_started_this_one_does_not_count() -> None:
    code = """
import subprocess, sys
from loadmaster.observe.memory import peak_rss
block = bytearray(256 << 20)
block[::4096] = bytes(len(block) // 4096)
child = "from loadmaster.observe.memory import peak_rss; print(peak_rss())"
print(peak_rss(), subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout.decode())
"""
    parent, child = numbers_of(code)
    assert parent > 256 * MIB
    assert 4 * MIB < child < 128 * MIB


def test_the_peak_is_at_least_what_is_held_now() -> None:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert peak_rss() >= resident_pages * os.sysconf("SC_PAGE_SIZE") - 4 * MIB  # the kernel counts per CPU and rounds


def test_the_peak_is_read_from_the_status_file_in_kilobytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t   99999 kB\nVmHWM:\t   12345 kB\nVmRSS:\t   11111 kB\n")
    assert peak_rss(status) == 12345 * 1024


@pytest.mark.parametrize("content", [None, "Name:\tpython\n"], ids=["no file", "no line"])
def test_without_the_status_file_the_resource_usage_tells(tmp_path: Path, content: str | None) -> None:
    status = tmp_path / "status"
    if content is not None:
        status.write_text(content)
    assert peak_rss(status) >= peak_rss() - 4 * MIB

"""Kinds of cores on hybrid machines (performance and efficiency cores, big.LITTLE), from sysfs.

No single file tells, so two CPUs are of one kind when every signal that the host has puts them together: Intel's device
lists, the scheduler's capacity, the highest and the base frequency, Arm's main ID register. Values that lie close
together count as one, since equal cores differ by a few percent (favoured cores, a cluster clocked a little higher).

Sources: the kernel's ``Documentation/ABI/testing/sysfs-devices-system-cpu`` (``cpu_capacity``,
``regs/identification``), ``Documentation/admin-guide/pm/cpufreq.rst``, and ``arch/x86/events/intel/core.c`` for the
names of the devices, which hold one kind of core each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from loadmaster.host.cpulist import parse_cpulist
from loadmaster.host.files import HostFiles
from loadmaster.host.topology import CPU_FOLDER, read_cpus

__all__ = ["classes_of", "parse_midr", "read_kinds"]

Signal = dict[int, tuple[float, str]]
"""CPU -> its place from slow to fast, and a label."""

_DEVICES = ("cpu_lowpower", "cpu_atom", "cpu_core")  # slowest first
_GAP = 0.10
_KHZ = 1e6  # of them in a GHz: cpufreq counts in kHz


def read_kinds(files: HostFiles, online: Sequence[int]) -> dict[str, tuple[int, ...]] | None:
    """Return kind -> CPUs, slowest first, or None where all cores are alike or nothing tells."""
    readers = (_devices, _capacities, _highest_frequencies, _base_frequencies, _parts)
    signals = [signal for read in readers if len(set((signal := read(files, online)).values())) > 1]
    if not signals:
        return None
    kinds: dict[tuple[tuple[float, str], ...], list[int]] = {}
    for cpu in online:
        kinds.setdefault(tuple(signal[cpu] for signal in signals), []).append(cpu)
    keys = sorted(kinds)
    return {name: tuple(kinds[key]) for name, key in zip(_names(keys), keys, strict=True)}


def classes_of(values: Collection[float], gap: float = _GAP) -> list[tuple[float, float]]:
    """Return the lowest and the highest value of each class of close values, ascending.

    A class ends where the next higher value is more than ``gap`` (a fraction) above.
    """
    classes: list[tuple[float, float]] = []
    for value in sorted(values):
        if classes and value <= classes[-1][1] * (1 + gap):
            classes[-1] = (classes[-1][0], value)
        else:
            classes.append((value, value))
    return classes


def parse_midr(text: str) -> int:
    """Return implementer and part number of an Arm main ID register, without variant and revision.

    Source: Arm Architecture Reference Manual, MIDR_EL1: the implementer in bits 31-24, the part number in bits 15-4.

    Raises
    ------
    ValueError
        If the text is no hexadecimal number.
    """
    return int(text.strip(" \n\0"), 16) & 0xFF00FFF0


def _devices(files: HostFiles, online: Sequence[int]) -> Signal:
    signal: Signal = {}
    for place, device in enumerate(_DEVICES):
        found = read_cpus(files, f"/sys/devices/{device}", [("cpus", parse_cpulist)])
        # A slower device comes first and keeps its CPUs, which a faster one may name as well.
        signal = dict.fromkeys(found[0] if found else (), (place, device)) | signal
    return signal if signal.keys() >= set(online) else {}


def _capacities(files: HostFiles, online: Sequence[int]) -> Signal:
    return _classify(_values(files, online, "cpu_capacity", int), "capacity {}", 1)


def _highest_frequencies(files: HostFiles, online: Sequence[int]) -> Signal:
    return _classify(_values(files, online, "cpufreq/cpuinfo_max_freq", int), "{} GHz", _KHZ)


def _base_frequencies(files: HostFiles, online: Sequence[int]) -> Signal:
    return _classify(_values(files, online, "cpufreq/base_frequency", int), "base {} GHz", _KHZ)


def _parts(files: HostFiles, online: Sequence[int]) -> Signal:
    parts = _values(files, online, "regs/identification/midr_el1", parse_midr)
    return {cpu: (0, f"part {part >> 24:#x}/{part >> 4 & 0xFFF:#x}") for cpu, part in parts.items()}


def _values(files: HostFiles, online: Sequence[int], name: str, parse: Callable[[str], int]) -> dict[int, int]:
    """CPU -> number in its file; empty when one CPU lacks it, since the others' would not tell that CPU's kind."""
    values: dict[int, int] = {}
    for cpu in online:
        text = files.read(f"{CPU_FOLDER}/cpu{cpu}/{name}")
        try:
            values[cpu] = parse((text or "").strip(" \n\0"))
        except ValueError:
            return {}
    return values


def _classify(values: dict[int, int], label: str, scale: float) -> Signal:
    labels: dict[int, tuple[float, str]] = {}
    for place, (lowest, highest) in enumerate(classes_of(set(values.values()))):
        span = f"{lowest / scale:.4g}" if lowest == highest else f"{lowest / scale:.4g}-{highest / scale:.4g}"
        labels |= {value: (place, label.format(span)) for value in values.values() if lowest <= value <= highest}
    return {cpu: labels[value] for cpu, value in values.items()}


def _names(keys: Sequence[tuple[tuple[float, str], ...]]) -> list[str]:
    """One name per kind: the labels of as few signals as tell the kinds apart."""
    names: list[str] = []
    for length in range(1, len(keys[0]) + 1):
        names = [", ".join(label for _, label in key[:length]) for key in keys]
        if len(set(names)) == len(keys):
            break
    return names

"""What may this process use? CPUs, physical cores, NUMA nodes and quota, each with its source.

Needs no torch, starts no process, and reads the host anew at each call, save for `recent_host`.
"""

from __future__ import annotations

from loadmaster.host.cpulist import format_cpulist
from loadmaster.host.host import Host, host, read_host, recent_host
from loadmaster.host.limits import Limit

__all__ = ["Host", "Limit", "format_cpulist", "host", "read_host", "recent_host"]

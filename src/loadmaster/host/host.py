"""How many threads may this process really use, on which CPUs, and why: every limit counted, each with its source."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from loadmaster.errors import InputError
from loadmaster.host.affinity import Affinity, read_affinity, read_num_cores
from loadmaster.host.cgroup import Groups, read_groups
from loadmaster.host.files import HostFiles
from loadmaster.host.kinds import read_kinds
from loadmaster.host.notices import warn_once
from loadmaster.host.topology import Topology, read_topology

__all__ = ["Host", "Limit", "host", "read_host"]

logger = logging.getLogger(__name__)

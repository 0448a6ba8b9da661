"""The thread run times that this process has really loaded, and the counts of the calling thread.

An OpenMP thread count belongs to the calling thread. ``torch.set_num_threads`` changes it and, besides, what threads
that start later begin with; the run time's own ``omp_set_num_threads`` changes the calling thread alone. MKL has a
count per thread too, which torch sets together with its own; OpenBLAS has one for the process (`ProcessCounts`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loadmaster.host.notices import warn_once
from loadmaster.threads.importing import import_torch

__all__ = [
    "CountsHere",
    "RunTimes",
    "counts_here",
    "parse_backend",
    "release_idle_team",
    "run_times",
    "set_counts_here",
    "set_threads_here",
    "threads_of_new_threads",
    "torch_backend",
    "use_one_thread_here",
]

_log = logging.getLogger(__name__)

_SOFT_PAUSE = 1
"""``omp_pause_soft`` of OpenMP 5.0, section 3.2.44: give idle resources back, keep the state."""


class RunTimes(NamedTuple):
    """The run times found in this process: threadpoolctl's controllers, of which ``filepath`` names the library."""

    openmp: tuple[Any, ...]
    blas: tuple[Any, ...]


class CountsHere(NamedTuple):
    """The counts of one thread: torch's, and the one that MKL was told for this thread (0: it follows OpenMP)."""

    threads: int
    mkl: int


_found: tuple[int, RunTimes] | None = None


def run_times() -> RunTimes:
    """Return the run times of this process; looked for again only when a library was loaded since."""
    global _found
    loads = _libraries_loaded()
    if _found is None or _found[0] != loads:
        from threadpoolctl import ThreadpoolController

        controllers = ThreadpoolController().lib_controllers
        _found = (
            loads,
            RunTimes(
                tuple(row for row in controllers if row.user_api == "openmp"),
                tuple(row for row in controllers if row.user_api == "blas"),
            ),
        )
        _warn_about_two(_found[1].openmp)
    return _found[1]


def _warn_about_two(openmp: tuple[Any, ...]) -> None:
    if len(openmp) > 1:
        paths = " and ".join(row.filepath for row in openmp)
        warn_once(
            __name__,
            f"{len(openmp)} OpenMP run times are loaded in this process, {paths}: each keeps a team of its own, and "
            "together they start more threads than there are CPUs; the count of each is set",
        )


class _ObjectInfo(ctypes.Structure):
    """The start of ``dl_phdr_info`` (dl_iterate_phdr(3)); ``adds`` counts the libraries ever loaded."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("header_count", ctypes.c_uint16),
        ("adds", ctypes.c_ulonglong),
    ]


def _libraries_loaded() -> int:
    """A number that rises with every library that is loaded."""
    counter = _library_counter()
    return len(sys.modules) if counter is None else counter()


@functools.cache
def _library_counter() -> Callable[[], int] | None:
    """The dynamic linker's own counter, None where it has none."""
    try:
        iterate = ctypes.CDLL(None).dl_iterate_phdr
    except (AttributeError, OSError, TypeError):
        return None
    seen: list[int] = [0]

    def first(info: Any, size: int, _: object) -> int:
        seen[0] = info.contents.adds if size > _ObjectInfo.adds.offset else len(sys.modules)
        return 1  # one object tells it

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_ObjectInfo), ctypes.c_size_t, ctypes.c_void_p)
    callback = kind(first)

    def counter() -> int:
        iterate(callback, None)
        return seen[0]

    return counter


@functools.cache
def torch_backend() -> str:
    """What runs torch's intra-op work: ``OpenMP`` or ``native thread pool``."""
    return parse_backend(import_torch().__config__.parallel_info())


def parse_backend(parallel_info: str) -> str:
    """Return the backend that ``torch.__config__.parallel_info()`` names, or an empty text."""
    found = re.search(r"^ATen parallel backend:[ \t]*(\S.*?)[ \t]*$", parallel_info, re.MULTILINE)
    return found[1] if found else ""


def counts_here() -> CountsHere:
    """Return the counts of the calling thread."""
    threads = import_torch().get_num_threads()
    mkl = 0
    for set_local in _mkl_setters():
        mkl = set_local(0)
        set_local(mkl)
    return CountsHere(threads, mkl)


def set_counts_here(counts: CountsHere) -> bool:
    """Set the counts of the calling thread alone; False where no OpenMP run time is loaded.

    torch sets a thread's count when the thread first asks for it (``at::internal::lazy_init_num_threads``), so it is
    asked first and told after.
    """
    import_torch().get_num_threads()
    controllers = run_times().openmp
    for controller in controllers:
        controller.set_num_threads(counts.threads)
    for set_local in _mkl_setters():
        set_local(counts.mkl)
    return bool(controllers)


def set_threads_here(threads: int) -> bool:
    """Set the intra-op threads of the calling thread alone, MKL's too; False where no OpenMP run time is loaded."""
    return set_counts_here(CountsHere(threads, threads))


def use_one_thread_here() -> None:
    """Let torch run with one thread in the calling thread, and only there."""
    if not set_threads_here(1):
        _log.debug("no OpenMP run time is loaded: torch's threads are left as they are")


def release_idle_team() -> None:
    """Let the idle members of the calling thread's team end; the next large operation starts a team as needed.

    ``omp_pause_resource_all`` joins them in libgomp, which keeps a team per thread: measured 0.17 to 0.29 ms for 7
    members on 2 CPUs, where a last small region at 2 leaves one member and takes several milliseconds in a quarter of
    all cases. The LLVM and Intel run times keep one pool for the process and let its idle members sleep.
    """
    for controller in run_times().openmp:
        pause = getattr(controller.dynlib, "omp_pause_resource_all", None)
        if pause is not None:
            pause(_SOFT_PAUSE)


def _mkl_setters() -> tuple[Callable[[int], int], ...]:
    """``MKL_Set_Num_Threads_Local`` of every MKL in this process: the one in torch's library, and shared ones."""
    found = tuple(row.dynlib for row in run_times().blas if row.internal_api == "mkl")
    inside = _mkl_of_torch()
    return (*_local_setters(found), *([] if inside is None else [inside]))


def _local_setters(libraries: tuple[Any, ...]) -> Iterator[Callable[[int], int]]:
    for library in libraries:
        with contextlib.suppress(AttributeError):
            yield library.MKL_Set_Num_Threads_Local


@functools.cache
def _mkl_of_torch() -> Callable[[int], int] | None:
    """The setter of the MKL that is linked into torch, where threadpoolctl does not see it; None without one."""
    return getattr(_torch_library(), "MKL_Set_Num_Threads_Local", None)


@functools.cache
def _torch_library() -> Any:
    """torch's own library, which is loaded already; None where it has another form."""
    path = Path(import_torch().__file__ or "", "..", "lib", "libtorch_cpu.so").resolve()
    try:
        return ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (AttributeError, OSError):
        return None


def threads_of_new_threads() -> int:
    """What a thread that starts now begins with; torch tells it only to such a thread.

    The thread runs nothing but ``at::get_num_threads``: measured 20 us, and 60 to 160 for one that needs the
    interpreter's lock.
    """
    native = _native_probe()
    return _probe_in_python() if native is None else native()


@functools.cache
def _native_probe() -> Callable[[], int] | None:
    function = getattr(_torch_library(), "_ZN2at15get_num_threadsEv", None)  # at::get_num_threads()
    try:
        process = ctypes.CDLL(None)
        create, join = process.pthread_create, process.pthread_join
    except (AttributeError, OSError, TypeError):
        return None
    if function is None:
        return None
    start = ctypes.cast(function, ctypes.c_void_p)
    create.argtypes = [ctypes.POINTER(ctypes.c_ulong), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    join.argtypes = [ctypes.c_ulong, ctypes.POINTER(ctypes.c_void_p)]

    def probe() -> int:
        thread, result = ctypes.c_ulong(), ctypes.c_void_p()
        if create(ctypes.byref(thread), None, start, None):
            return _probe_in_python()
        join(thread, ctypes.byref(result))
        return (result.value or 0) & 0xFFFF_FFFF  # an int fills the lower half of the register

    return probe


def _probe_in_python() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(import_torch().get_num_threads()), name="loadmaster-probe")
    thread.start()
    thread.join()
    return found[0]

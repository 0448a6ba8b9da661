"""Who else loads on this host, and what is this process's part? Needs no torch and starts no process."""

from __future__ import annotations

from loadmaster.share.share import MAX_THREADS_PER_PROCESS, Share, exports_for, plan_shares, share

__all__ = [
    "MAX_THREADS_PER_PROCESS",
    "Share",
    "exports_for",
    "plan_shares",
    "share",
]

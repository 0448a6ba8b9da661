"""A child process, seen from its parent. Its life is tested with those who use it: tests/launch, tests/fetch."""

from __future__ import annotations

import pytest

from loadmaster.process.child import decode_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0 before it was done"),
        (3, "ended with exit code 3 before it was done"),
        (-9, "was killed by SIGKILL, possibly out of memory"),
        (-7, "was killed by SIGBUS, a mapped file was truncated or its storage failed"),
        (-11, "was killed by SIGSEGV, a crash in native code"),
        (-6, "was killed by SIGABRT, native code gave up"),
        (-4, "was killed by SIGILL, an instruction that this CPU does not have"),
        (-24, "was killed by SIGXCPU, the limit of CPU time was reached"),
        (-15, "was killed by SIGTERM"),
        (-40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended_is_said_in_words(code: int, words: str) -> None:
    assert decode_exit(code) == words

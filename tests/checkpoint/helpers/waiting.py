"""Work that must answer: run in a thread, so that a test can fail instead of hanging."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_time(work: Callable[[], Any], release: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Run ``work`` in a thread and return what it returns; when it does not answer, let it go and fail."""
    answers: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    hung = thread.is_alive()
    if hung:
        release()
        thread.join(seconds)
    assert not hung, "this hangs"
    if errors:
        raise errors[0]
    return answers[0]

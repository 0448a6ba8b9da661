"""Other people's readers are arms where they are installed, and not listed where they are not."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

from loadmaster.bench import libraries
from loadmaster.bench.libraries import LIBRARIES, is_importable, safetensors_has_pread
from loadmaster.bench.load import arms_for


@pytest.mark.parametrize("present", [[], ["fastsafetensors"], ["safetensors-pread", "runai-model-streamer"]], ids=str)
def test_only_what_is_there_is_an_arm(present: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library in LIBRARIES.items():
        there = name in present
        monkeypatch.setitem(LIBRARIES, name, dataclasses.replace(library, is_there=lambda there=there: there))
    arms = arms_for(1)
    assert list(arms)[4:] == present
    assert {arms[name].function for name in present} <= {"loadmaster.bench.load:library_in_rank"}


@pytest.mark.parametrize(
    ("name", "module"), [("fastsafetensors", "fastsafetensors"), ("runai-model-streamer", "runai_model_streamer")]
)
def test_a_library_is_there_when_its_module_is_found(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is found and not imported: it would end the test."""
    (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert LIBRARIES[name].is_there()
    monkeypatch.setattr(sys, "path", [])
    assert not LIBRARIES[name].is_there()


def test_a_module_that_was_taken_out_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)
    assert not is_importable("fastsafetensors")


@pytest.mark.parametrize(
    ("refusal", "there"),
    [
        (None, True),
        (TypeError("no keyword backend"), False),
        (safetensors.SafetensorError("backend is invalid"), False),
    ],
    ids=["offered", "no such argument", "no such backend"],
)
def test_the_library_is_asked_whether_it_has_the_backend(
    refusal: Exception | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    class Opened:
        def __init__(self, path: Path, framework: str, *, backend: str) -> None:
            asked.append((path.read_bytes(), framework, backend))
            if refusal is not None:
                raise refusal

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(safetensors, "safe_open", Opened)
    assert safetensors_has_pread.__wrapped__() is there
    assert asked == [(b"\2" + bytes(7) + b"{}", "np", "pread")]


def test_without_the_library_there_is_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "is_importable", lambda module: False)
    assert not safetensors_has_pread.__wrapped__()

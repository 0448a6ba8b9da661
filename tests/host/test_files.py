from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadmaster.host.files import HostFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("outside")
    root = tmp_path / "root"
    (root / "sys" / "folder").mkdir(parents=True)
    (root / "sys" / "folder" / "file").write_text("inside\n")
    (root / "outside").write_text("inside")
    return root


def test_a_file_is_read_below_the_root(root: Path) -> None:
    assert HostFiles(root).read("/sys/folder/file") == "inside\n"


@pytest.mark.parametrize("path", ["/missing", "/missing/file", "/sys", "/sys/folder/file/file", "/a\0b"])
def test_what_is_no_readable_file_is_none(root: Path, path: str) -> None:
    assert HostFiles(root).read(path) is None


@pytest.mark.parametrize(
    "target",
    ["/outside", "../../../../outside", "/../outside", "/sys/../../outside", "/./outside"],
)
def test_a_link_that_leads_out_of_the_root_stays_inside(root: Path, target: str) -> None:
    (root / "sys" / "link").symlink_to(target)
    assert HostFiles(root).read("/sys/link") == "inside"


@pytest.mark.parametrize("target", ["/", "../..", "/../.."])
def test_a_folder_link_that_leads_out_of_the_root_stays_inside(root: Path, target: str) -> None:
    (root / "sys" / "top").symlink_to(target)
    files = HostFiles(root)
    assert files.read("/sys/top/outside") == "inside"
    assert files.names("/sys/top") == files.names("/")


def test_a_path_with_dots_stays_inside(root: Path) -> None:
    assert HostFiles(root).read("/sys/../../../outside") == "inside"


def test_a_link_to_a_link_is_followed(root: Path) -> None:
    (root / "first").symlink_to("second")
    (root / "second").symlink_to("/sys/folder")
    assert HostFiles(root).read("/first/file") == "inside\n"


def test_links_in_a_circle_are_no_file(root: Path) -> None:
    (root / "first").symlink_to("second")
    (root / "second").symlink_to("first")
    files = HostFiles(root)
    assert files.read("/first") is None
    assert files.read("/first/file") is None
    assert files.names("/first") == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_named_pipe_does_not_block(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert HostFiles(root).read("/pipe") == ""


def test_bytes_that_are_no_text_are_read(root: Path) -> None:
    (root / "bytes").write_bytes(b"\xff\n")
    assert HostFiles(root).read("/bytes") == "\udcff\n"


def test_a_file_longer_than_one_read_is_whole(root: Path) -> None:
    (root / "long").write_text("x" * 300_000)
    assert len(HostFiles(root).read("/long") or "") == 300_000


def test_names_of_a_folder(root: Path) -> None:
    assert sorted(HostFiles(root).names("/")) == ["outside", "sys"]
    assert HostFiles(root).names("/missing") == []


def test_only_the_root_itself_is_live(root: Path) -> None:
    assert HostFiles("/").live
    assert not HostFiles(root).live

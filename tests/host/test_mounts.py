from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.host.cgroup import levels
from loadmaster.host.mounts import GroupMount, parse_mountinfo, parse_mounts, parse_self_cgroup, unescape

LINE = "36 35 98:0 {root} {folder} rw,noatime {optional}- {kind} source {options}"


def line(
    root: str = "/", folder: str = "/mnt", optional: str = "master:1 ", kind: str = "cgroup", options: str = "rw,cpu"
) -> str:
    return LINE.format(root=root, folder=folder, optional=optional, kind=kind, options=options)


def escape(text: str) -> str:
    """What the kernel's seq_path writes."""
    return "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\#" else letter for letter in text)


@pytest.mark.parametrize("optional", ["", "shared:1 ", "shared:1 master:2 propagate_from:3 unbindable "])
def test_any_number_of_optional_fields(optional: str) -> None:
    (mount,) = parse_mountinfo(line(optional=optional))
    assert mount == GroupMount(1, frozenset({"rw", "cpu"}), "/", "/mnt")


@pytest.mark.parametrize(
    ("kind", "options", "version", "controller"),
    [("cgroup", "rw,cpu,cpuacct", 1, "cpu"), ("cgroup2", "rw,nsdelegate", 2, ""), ("cpuset", "rw", 1, "cpuset")],
)
def test_the_kinds_of_hierarchy(kind: str, options: str, version: int, controller: str) -> None:
    for (mount,) in (parse_mountinfo(line(kind=kind, options=options)), parse_mounts(f"x /mnt {kind} {options} 0 0")):
        assert mount.version == version
        assert not controller or controller in mount.controllers


def test_other_file_systems_are_not_returned() -> None:
    assert parse_mountinfo(line(kind="tmpfs") + "\n" + line(kind="cgroupx")) == ()
    assert parse_mounts("tmpfs /sys/fs/cgroup tmpfs rw,cpu 0 0\n") == ()


@pytest.mark.parametrize(
    "text", ["", "\n", "36 35 98:0 / /mnt rw cgroup cgroup rw,cpu", "36 35 - cgroup c rw,cpu", "- - -"]
)
def test_lines_in_another_form_are_passed_over(text: str) -> None:
    assert parse_mountinfo(text) == ()


def test_a_later_mount_on_the_same_folder_hides_the_earlier() -> None:
    (mount,) = parse_mountinfo(line(root="/old") + "\n" + line(root="/new"))
    assert mount.root == "/new"


def test_escapes_in_root_and_folder() -> None:
    (mount,) = parse_mountinfo(line(root="/a\\040b", folder="/c\\011\\134\\012d"))
    assert (mount.root, mount.folder) == ("/a b", "/c\t\\\nd")


def test_groups_of_a_process() -> None:
    text = "4:cpu,cpuacct:/a:b\n3:cpuset:/\n1:name=systemd:/x\n0::/unified\nnonsense\n5:memory:relative\n"
    groups = parse_self_cgroup(text)
    assert groups["cpu"] == groups["cpuacct"] == "/a:b"
    assert groups["cpuset"] == "/"
    assert groups[""] == "/unified"
    assert "memory" not in groups


@given(st.text(alphabet="abc \t\n\\#0147é", max_size=20))
def test_unescaping_undoes_the_kernels_escapes(text: str) -> None:
    assert unescape(escape(text)) == text


@given(st.text(alphabet="abc/ -:\\014\n", max_size=200))
def test_parsers_never_fail(text: str) -> None:
    for parse in (parse_mountinfo, parse_mounts, parse_self_cgroup):
        parse(text)


names = st.text(alphabet="abc. -", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, max_size=5).map(lambda parts: "/" + "/".join(parts))


@given(paths, paths, st.sampled_from(["/sys/fs/cgroup", "/mnt/"]))
def test_levels_go_from_the_leaf_to_the_mount_root(root: str, below: str, folder: str) -> None:
    group = root.rstrip("/") + below.rstrip("/") or "/"
    found = levels(GroupMount(2, frozenset(), root, folder), group)
    top = folder.rstrip("/")
    assert found is not None
    assert found[0] == (top + below).rstrip("/")
    assert found[-1] == top
    assert all(leaf.rpartition("/")[0] == parent for leaf, parent in pairwise(found))


@given(paths | st.just("/.."), st.lists(names | st.just(".."), max_size=6))
def test_levels_never_leave_the_mount(root: str, parts: list[str]) -> None:
    found = levels(GroupMount(1, frozenset({"cpu"}), root, "/m"), "/" + "/".join(parts))
    assert all(folder == "/m" or folder.startswith("/m/") for folder in found or ())
    assert all(".." not in folder.split("/") for folder in found or ())


@pytest.mark.parametrize(
    ("root", "group", "expected"),
    [
        ("/", "/", ("/m",)),
        ("/", "/a/b", ("/m/a/b", "/m/a", "/m")),
        ("/docker/x", "/docker/x", ("/m",)),
        ("/docker/x", "/docker/x/y", ("/m/y", "/m")),
        ("/docker/x", "/docker/xy/z", ("/m",)),
        ("/docker/x", "/", ("/m",)),
        ("/..", "/", ("/m",)),
        ("/..", "/../a", ("/m/a", "/m")),
        ("/", "/../a", None),
    ],
)
def test_levels_of_bind_mounts_and_namespaces(root: str, group: str, expected: tuple[str, ...] | None) -> None:
    assert levels(GroupMount(2, frozenset(), root, "/m"), group) == expected

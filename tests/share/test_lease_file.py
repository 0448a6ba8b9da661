from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_environments import ENVIRONMENTS
from made_hosts import make_host, smt_host

from loadmaster.host import Host
from loadmaster.share.fairness import Claim, Group, Quota
from loadmaster.share.launcher import read_declared
from loadmaster.share.lease_file import LeaseFile, Membership, describe_process, parse_lease
from loadmaster.share.share import read_request

EIGHT = smt_host(8)


def describe(environ: dict[str, str], host: Host = EIGHT, threads: int | None = None) -> LeaseFile:
    here, settings = read_request(host, None, 1, threads, environ, "workers")
    return describe_process(host, here, settings, read_declared(environ), environ, 1.0)


files = st.builds(
    LeaseFile,
    pid=st.integers(1, 1 << 22),
    command=st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=80).map(
        lambda text: "".join(letter for letter in text if letter.isprintable())
    ),
    since=st.floats(0, 1e12),
    started=st.floats(0, 1e12),
    cpus=st.frozensets(st.integers(0, 8191), min_size=1),
    cores=st.frozensets(st.integers(0, 8191), min_size=1),
    weight=st.floats(1e-3, 1e3),
    quotas=st.lists(st.builds(Quota, st.just("29:1"), st.integers(1, 1000)), max_size=3).map(tuple),
    membership=st.none() | st.builds(Membership, st.just("0a1b"), st.integers(1, 64), st.just("p12")),
    threads=st.none() | st.integers(1, 256),
    at_most=st.integers(1, 16),
)


@given(files)
def test_what_is_written_is_read(file: LeaseFile) -> None:
    assert parse_lease(file.to_json()) == file


def test_the_widest_host_fits() -> None:
    every_second = frozenset(range(0, 8192, 2))
    file = describe({}, make_host([(0,)]))
    whole = LeaseFile(**{name: getattr(file, name) for name in LeaseFile.__slots__} | {"cpus": every_second})
    assert len(whole.to_json()) < 65536


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(files, st.data())
def test_a_value_of_another_form_is_refused_or_read_but_never_an_error(file: LeaseFile, data: st.DataObject) -> None:
    document = json.loads(file.to_json())
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(json_values)
    with contextlib.suppress(ValueError):
        assert isinstance(parse_lease(json.dumps(document).encode()).to_claim("name"), Claim)


@given(st.binary(max_size=200))
def test_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not|its version"):
        parse_lease(content)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pid", 0, "its pid is no whole number from 1 to"),
        ("pid", True, "its pid is no whole number from 1 to"),
        ("weight", 0, "its weight is no number above 0"),
        ("weight", float("nan"), "its weight is no number above 0"),
        ("since", "now", "its since is no number"),
        ("since", 10**400, "its since is no number"),
        ("cpus", "", "its cpus are no list of CPUs"),
        ("cores", "0-9999999", "beyond"),
        ("cores", [0], "its cores are no list of CPUs"),
        ("command", None, "its command is no text"),
        ("threads", 0, "its threads is no whole number from 1 to"),
        ("at_most", None, "its at_most is no whole number from 1 to"),
        ("quotas", {}, "its quotas are no list of objects"),
        ("quotas", [{"id": "", "cpus": 1}], "its id is no short text"),
        ("quotas", [{"id": "a", "cpus": 0}], "its cpus is no whole number from 1 to"),
        ("group", "a", "its group is no object"),
        ("group", {"id": "a", "ranks": 10**6, "member": "1"}, "its ranks is no whole number from 1 to"),
    ],
)
def test_what_is_wrong_is_said(key: str, value: object, words: str) -> None:
    document = json.loads(describe({}).to_json()) | {key: value}
    with pytest.raises(ValueError, match=words):
        parse_lease(json.dumps(document).encode())


def test_a_command_cannot_steer_a_terminal() -> None:
    document = json.loads(describe({}).to_json()) | {"command": "a\x1b[2Jb\n" + "c" * 200}
    assert parse_lease(json.dumps(document).encode()).command == "a [2Jb " + "c" * 70 + "..."


# What a process claims


def test_a_core_has_one_name_whichever_of_its_threads_are_usable() -> None:
    """Two processes on the two hardware threads of the same cores share these cores."""
    whole = tuple((cpu, cpu + 4) for cpu in range(4))
    low, high = (
        Host(**{name: getattr(found, name) for name in Host.__slots__ if name[0] != "_"} | {"online_cores": whole})
        for found in (make_host([(0,), (1,)]), make_host([(4,), (5,)]))
    )
    assert describe({}, low).cores == describe({}, high).cores == {0, 1}
    assert describe({}, high).cpus == {4, 5}


def test_a_quota_is_known_by_its_control_group() -> None:
    (quota,) = describe({}, smt_host(8, quota=2.9)).quotas
    assert quota == Quota("a test", 2)


def test_two_groups_at_the_same_path_are_two(tmp_path: Path) -> None:
    """Seen from two containers, both groups may be at the same path: device and inode tell them apart."""
    from loadmaster.share.lease_file import _identity

    for name in "ab":
        (tmp_path / name).mkdir()
    one, two = (_identity(str(tmp_path / name / "cpu.max")) for name in "ab")
    found = (tmp_path / "a").stat()
    assert one == f"{found.st_dev}:{found.st_ino}" != two


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_ranks_of_one_job_are_one_group(launcher: str) -> None:
    environ = ENVIRONMENTS[launcher]
    first, again = describe(environ).membership, describe(environ).membership
    assert first is not None
    assert first == again
    assert (first.ranks, first.member) == (4, "1")


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_PORT"),
        ({"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}, "TORCHELASTIC_RUN_ID"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1"}, "PMIX_NAMESPACE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1"}, "SLURM_STEP_ID"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "1"}, "FLUX_JOB_ID"),
        ({"LOADMASTER_LOCAL_SIZE": "2", "LOADMASTER_GROUP": "1"}, "LOADMASTER_GROUP"),
        ({"LOCAL_WORLD_SIZE": "2", "LOADMASTER_GROUP": "1"}, "LOADMASTER_GROUP"),
    ],
)
def test_another_job_is_another_group(environ: dict[str, str], name: str) -> None:
    one, other = describe(environ).membership, describe(environ | {name: "2"}).membership
    assert one is not None
    assert other is not None
    assert one.group != other.group


def test_ranks_without_a_number_are_told_apart_by_their_process() -> None:
    found = describe({"LOCAL_WORLD_SIZE": "2"}).membership
    assert found is not None
    assert found.member == f"p{os.getpid()}"


def test_who_is_alone_or_has_a_mask_of_its_own_belongs_to_no_group() -> None:
    assert describe({}).membership is None
    slurm = {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_LOCALID": "1", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "1"}
    assert describe(slurm, smt_host(4, of_cores=32)).membership is None


def test_bounds_and_explicit_numbers_are_claimed() -> None:
    assert describe({"OMP_NUM_THREADS": "3"}).at_most == 3
    assert (describe({}).at_most, describe({}).threads) == (16, None)
    assert describe({"LOADMASTER_THREADS": "5"}).threads == 5
    assert describe({}, threads=99).threads == 16  # the CPUs of this host


def test_a_claim_for_the_arithmetic() -> None:
    file = describe({"LOADMASTER_LOCAL_SIZE": "2", "LOADMASTER_LOCAL_RANK": "1"}, smt_host(2, quota=1.5))
    assert file.membership is not None
    group = Group(file.membership.group, 2, 1)
    assert file.to_claim("name", 1) == Claim("name", frozenset({0, 1}), 1.0, (Quota("a test", 1),), group, None, 16)

"""Leases between real processes."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lease_processes import Process, Start, until

from loadmaster.errors import InputError
from loadmaster.share import lease_claim
from loadmaster.share.lease import Lease, lease, live_leases
from loadmaster.share.lease_folder import open_folder

pytestmark = pytest.mark.processes

EIGHT = list(range(8))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def threads(*processes: Process) -> list[int]:
    return [process.look()["threads"] for process in processes]


# Coming and going


def test_two_that_know_nothing_of_each_other_share(start: Start) -> None:
    one, two = start(), start()
    one.join(EIGHT)
    assert one.look() == {"threads": 8, "workers": 1, "why": "8 cores / 1 rank", "rank": 0}
    two.join(EIGHT)
    shared = {"threads": 4, "workers": 2, "why": "8 cores / 2 processes that load", "rank": None}
    assert [two.look(), one.look()] == [shared, shared]
    assert one.log() == ["INFO threads of this process: 8 -> 4 (8 cores / 2 processes that load)"]


def test_on_this_host_as_it_is(start: Start) -> None:
    one, two = start(), start()
    one.join()
    alone = one.look()["threads"]
    two.join()
    assert threads(one, two) == [max(1, alone // 2)] * 2 or alone == 16


def test_who_leaves_is_missed_at_once(start: Start) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.join(EIGHT)
    assert threads(one, two) == [4, 4]
    two.leave()
    assert threads(one) == [8]


def test_who_is_killed_is_missed_within_a_fifth_of_a_second(start: Start) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.join(EIGHT)
    assert threads(one, two) == [4, 4]
    two.kill()
    assert until(lambda: threads(one) == [8]) < 0.2


def test_a_killed_one_is_missed_at_the_first_look_after_a_tenth_of_a_second(start: Start) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.join(EIGHT)
    assert threads(one, two) == [4, 4]
    two.kill()
    killed = time.monotonic()
    until(lambda: time.monotonic() > killed + 0.1)
    assert threads(one) == [8]


def test_a_crowd_that_is_killed_is_missed_by_few_looks_at_each(start: Start, folder: Path) -> None:
    one, crowd = start(), start()
    one.join(EIGHT)
    crowd.crowd(100)
    assert one.look()["workers"] == 101
    crowd.kill()
    assert until(lambda: one.look()["workers"] == 1) < 2.0
    assert len(names(folder)) == 2


def test_three_on_eight_cores_leave_the_remainder(start: Start) -> None:
    several = [start() for _ in range(3)]
    for process in several:
        process.join(EIGHT)
    assert threads(*several) == [2, 2, 2]


def test_a_look_with_nothing_changed_asks_the_clock_only_and_returns_the_same(start: Start, folder: Path) -> None:
    one = start()
    one.join(EIGHT)
    assert one.called() == ["monotonic"]
    with lease() as own:
        assert own.look() is own.look()


def test_a_look_after_a_tenth_of_a_second_returns_the_same_object(folder: Path) -> None:
    with lease() as own:
        found = own.look()
        checked = own._claim.check_at  # type: ignore[union-attr]
        until(lambda: own.look() is not found or own._claim.check_at > checked)  # type: ignore[union-attr]
        assert own.look() is found


def test_who_is_alone_waits_for_nobody_and_who_finds_a_new_neighbour_waits_a_little(start: Start) -> None:
    one, two = start(), start()
    assert [one.pid > 0, two.pid > 0] == [True, True]
    _, slept = one.joined_look()
    assert slept == 0
    one.leave()
    one.send("join")
    one.send("leave")
    two.send("joined_look")
    assert [one.answer(), one.answer()] == [None, None]
    seconds, _ = two.answer()
    assert seconds < 1.0


@pytest.mark.parametrize(
    ("age", "environ", "waits"),
    [(0.0, {}, True), (1000.0, {}, False), (0.0, {"LOADMASTER_LOCAL_SIZE": "2"}, False)],
    ids=["a new one", "an old one", "declared ranks"],
)
@pytest.mark.usefixtures("folder")
def test_the_first_look_waits_until_nobody_joins(
    monkeypatch: pytest.MonkeyPatch, age: float, environ: dict[str, str], waits: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(lease_claim, "sleep", lambda seconds: slept.append(seconds) or time.sleep(seconds))
    monkeypatch.setattr(lease_claim, "QUIET_SECONDS", 500.0)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with lease() as own:
        assert own._claim is not None
        assert own._claim.file is not None
        neighbour = open_folder(os.environ, create=False)
        assert neighbour is not None
        started = time.monotonic() - age
        _, held = neighbour.publish(replace(own._claim.file, started=started, membership=None))
        begin = time.monotonic()
        own.look()
        assert (time.monotonic() - begin >= 0.05) >= waits
        assert bool(slept) == waits
        own.look()
        assert len(slept) <= 50
        os.close(held)
        neighbour.close()


# Who counts how


def test_declared_ranks_count_from_the_first_moment(start: Start) -> None:
    one = start(LOCAL_WORLD_SIZE="4", LOCAL_RANK="0", MASTER_PORT="1")
    one.join(EIGHT)
    assert one.look() == {"threads": 2, "workers": 4, "why": "8 cores / 4 ranks", "rank": 0}


def test_the_larger_of_declared_and_live_divides(start: Start) -> None:
    several = [start(LOADMASTER_LOCAL_SIZE="2") for _ in range(3)]
    for process in several:
        process.join(list(range(6)))
    assert threads(*several) == [2, 2, 2]
    other = start()
    other.join(list(range(6)))
    assert threads(*several, other) == [1, 1, 1, 1]


@pytest.mark.parametrize("end", ["leave", "kill", "close"])
def test_the_part_of_a_rank_that_has_ended_goes_to_those_still_loading(start: Start, folder: Path, end: str) -> None:
    ranks = [start(LOADMASTER_LOCAL_SIZE="4", LOADMASTER_LOCAL_RANK=str(rank)) for rank in range(4)]
    for process in ranks[:3]:
        process.join(EIGHT)
    assert threads(*ranks[:3]) == [2, 2, 2]
    getattr(ranks[0], end)()
    until(lambda: threads(*ranks[1:3]) == [2, 2])  # the fourth is still to come: 8 // 3
    ranks[3].join(EIGHT)
    assert threads(*ranks[1:]) == [2, 2, 2]
    getattr(ranks[1], end)()
    until(lambda: threads(*ranks[2:]) == [4, 4])
    assert ranks[2].look()["why"] == "8 cores / 2 of 4 ranks still to load"
    getattr(ranks[2], end)()
    until(lambda: threads(ranks[3]) == [8])
    ranks[3].leave()
    live_leases()
    assert names(folder) == []


def test_a_new_run_in_the_same_session_does_not_inherit_who_has_ended(start: Start) -> None:
    for _ in range(2):
        ranks = [start(LOADMASTER_LOCAL_SIZE="2", LOADMASTER_LOCAL_RANK=str(rank)) for rank in range(2)]
        ranks[0].join(EIGHT)
        assert threads(ranks[0]) == [4]
        ranks[1].join(EIGHT)
        ranks[0].leave()
        assert threads(ranks[1]) == [8]
        ranks[1].kill()


def test_two_groups_of_ranks_are_two(start: Start) -> None:
    for port in ("1", "2"):
        start(LOCAL_WORLD_SIZE="2", LOCAL_RANK="0", MASTER_PORT=port).join(EIGHT)
    late = start(LOCAL_WORLD_SIZE="2", LOCAL_RANK="1", MASTER_PORT="2")
    late.join(EIGHT)
    assert late.look() == {"threads": 2, "workers": 4, "why": "8 cores / 4 processes that load", "rank": 1}


def test_disjoint_cores_are_not_shared_and_overlapping_ones_are_shared_fairly(start: Start) -> None:
    one, two, three = start(), start(), start()
    one.join([0, 1])
    two.join(list(range(2, 8)))
    assert threads(one, two) == [2, 6]
    three.join([0, 1])
    assert threads(one, two, three) == [1, 6, 1]
    two.leave()
    two.join(EIGHT)
    assert threads(one, two, three) == [1, 6, 1]
    assert two.look()["why"] == "8 cores / 3 processes that load, of which 6 are a fair part"


def test_a_quota_that_only_one_may_use_is_its_own(start: Start) -> None:
    one, two = start(), start()
    one.join(EIGHT, 1.0, None, 2.5)
    two.join(EIGHT)
    assert threads(one, two) == [2, 6]
    assert one.look()["why"] == "quota 2.5 / 2 processes that load, of which 2 are a fair part"


def test_weights_divide(start: Start) -> None:
    one, two = start(), start()
    one.join(EIGHT, 3.0)
    two.join(EIGHT)
    assert threads(one, two) == [6, 2]


def test_an_explicit_number_never_follows_and_the_others_see_it(start: Start) -> None:
    one, two, three = start(LOADMASTER_THREADS="6"), start(), start()
    one.join(EIGHT)
    before = one.look()
    two.join(EIGHT)
    assert one.look() == before
    assert threads(one, two) == [6, 2]
    three.join(EIGHT, 1.0, 1)
    assert threads(one, two, three) == [6, 1, 1]
    assert sorted(row["threads"] for row in two.live()) == [1, 1, 6]


def test_what_an_upper_bound_leaves_goes_to_the_others(start: Start) -> None:
    one, two = start(OMP_NUM_THREADS="1"), start()
    one.join(EIGHT)
    two.join(EIGHT)
    assert threads(one, two) == [1, 7]
    assert one.look()["why"] == "8 cores / 2 processes that load, OMP_NUM_THREADS=1"


def test_the_ceiling_holds_among_neighbours(start: Start) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.join(list(range(64)))
    assert threads(one, two) == [16, 16]
    assert one.look()["why"] == "64 cores / 2 processes that load, at most 16 per process"


def test_all_leases_of_a_process_are_one_claim_of_the_largest_weight(start: Start) -> None:
    one, two = start(), start()
    one.join(EIGHT)
    two.join(EIGHT)
    one.join(EIGHT, 3.0)
    assert one.look(0)["threads"] == one.look(1)["threads"] == 6
    assert threads(two) == [2]
    assert [row["weight"] for row in two.live()] == [3.0, 1.0] or [row["weight"] for row in two.live()] == [1.0, 3.0]
    one.leave()
    assert threads(one, two) == [4, 4]
    one.leave()
    assert threads(two) == [8]


def test_a_bound_that_all_were_told_is_one_for_all(start: Start) -> None:
    several = [start(LOADMASTER_CPUS="1") for _ in range(2)]
    for process in several:
        process.join()
    assert threads(*several) == [1, 1]


# Nothing is left


def test_the_last_that_leaves_removes_all(start: Start, folder: Path) -> None:
    one, two = start(), start()
    one.join()
    assert [stat.filemode(found.stat().st_mode) for found in (folder, *folder.iterdir())] == [
        "drwx------",
        "-rw-------",
        "-rw-------",
    ]
    two.join()
    one.leave()
    assert len(names(folder)) == 2
    two.leave()
    assert names(folder) == []


def test_a_program_that_ends_without_leaving_leaves_nothing(start: Start, folder: Path) -> None:
    one = start()
    one.join()
    assert one.close() == 0
    assert names(folder) == []


def test_what_the_last_one_left_when_killed_is_removed_by_the_next_that_looks(start: Start, folder: Path) -> None:
    one = start()
    one.join()
    one.kill()
    assert len(names(folder)) == 2
    assert live_leases() == []
    assert names(folder) == []


def test_the_last_that_leaves_removes_what_a_killed_one_left(start: Start, folder: Path) -> None:
    one, two = start(), start()
    one.join()
    two.join()
    one.kill()
    two.leave()
    assert names(folder) == []


@pytest.mark.parametrize("nameless", [True, False])
def test_killed_at_any_line_nothing_stays_that_the_next_does_not_remove(start: Start, nameless: bool) -> None:
    one = start()
    if not nameless:
        one.without_nameless_files()
    assert one.die_at_every_line(0, 1 if nameless else 4) > 200


def test_killed_at_any_line_a_neighbour_keeps_its_share(start: Start) -> None:
    one, two = start(), start()
    one.join(EIGHT)
    assert two.die_at_every_line(1, 4) > 200
    assert threads(one) == [8]


# Forks


@pytest.mark.parametrize("way", ["fork", "run"])
def test_a_lease_ends_with_its_process_though_a_child_lives(start: Start, folder: Path, way: str) -> None:
    one, two = start(), start()
    one.join(EIGHT)
    two.join(EIGHT)
    child = getattr(one, way)()
    one.leave()
    assert threads(two) == [8]
    one.join(EIGHT)
    second = getattr(one, way)()
    assert threads(two) == [4]
    one.kill()
    try:
        until(lambda: threads(two) == [8], 2.0)
        os.kill(child, 0)
    finally:
        for alive in (child, second):
            os.kill(alive, 9)


def test_a_fork_leaves_the_lease_of_its_parent_alone_and_may_have_its_own(start: Start) -> None:
    one = start()
    one.join()
    alone = threads(one)
    one.join()  # and has not been looked at
    assert one.fork_and_leave() == [*alone, 2]
    assert [row["pid"] for row in one.live()] == [one.pid]
    assert threads(one) == alone


def test_forks_while_threads_join_and_leave(start: Start, folder: Path) -> None:
    one = start()
    one.fork_while_others_look(30)
    assert [line for line in one.log() if not line.startswith("INFO")] == []
    assert names(folder) == []


def test_hooks_come_with_the_first_lease_and_once(start: Start) -> None:
    assert start().hooks() == [0, 2]


# A folder that changes under us


def test_a_lease_whose_folder_was_removed_comes_back(start: Start, folder: Path) -> None:
    one, two = start(), start()
    one.join(EIGHT)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    two.join(EIGHT)
    until(lambda: threads(one, two) == [4, 4])
    one.leave()
    two.leave()
    assert names(folder) == []


def test_without_nameless_files(start: Start, folder: Path) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.without_nameless_files()
        process.join(EIGHT)
    assert threads(one, two) == [4, 4]
    one.leave()
    two.leave()
    assert names(folder) == []


# The object


def test_building_changes_nothing(folder: Path) -> None:
    lease()
    assert not folder.exists()


def test_a_lease_is_held_once(folder: Path) -> None:
    own = lease()
    with own:
        assert len(names(folder)) == 2
        with pytest.raises(InputError, match="this lease is held already"):
            own.join()
        assert own.look().workers == 1
    own.leave()
    with own:
        assert own.look().workers == 1
    with pytest.raises(InputError, match="this lease is not held"):
        own.look()
    assert names(folder) == []


def test_a_lease_ends_with_an_error_in_its_block(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), lease():
        1 / 0  # noqa: B018
    assert names(folder) == []


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_a_weight_is_a_number_above_0(weight: object) -> None:
    with pytest.raises(InputError, match="the weight of a lease must be a number above 0, not"):
        Lease(weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LOADMASTER_LEASES", "no", "LOADMASTER_LEASES must be on or off, not 'no'"),
        ("LOADMASTER_LEASES", "", "LOADMASTER_LEASES must be on or off, not ''"),
        ("LOADMASTER_DIR", "leases", "LOADMASTER_DIR must be an absolute path, not 'leases'"),
    ],
)
def test_a_bad_variable_names_itself(name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    own = lease()
    with pytest.raises(InputError) as error:
        own.join()
    assert str(error.value) == words
    with pytest.raises(InputError):
        live_leases()


def test_off_is_off_and_silent(start: Start, folder: Path) -> None:
    one, two = start(LOADMASTER_LEASES="off"), start(LOADMASTER_LEASES="on")
    two.join(EIGHT)
    one.join(EIGHT)
    assert threads(one, two) == [8, 8]
    assert one.log() == []
    assert one.live() == []
    assert len(two.live()) == 1


# Who is there


def test_the_list_tells_of_each(start: Start, folder: Path) -> None:
    one, two = start(), start(LOCAL_WORLD_SIZE="2", LOCAL_RANK="1")
    begin = time.time()
    one.join(EIGHT, 2.0)
    two.join([0, 1, 2, 3])
    first, second = live_leases()
    assert (first.pid, second.pid) == (one.pid, two.pid)
    assert (first.cpus, second.cpus) == (tuple(EIGHT), (0, 1, 2, 3))
    assert (first.weight, second.weight) == (2.0, 1.0)
    assert (first.ranks, second.ranks) == (None, 2)
    assert [first.threads, second.threads] == threads(one, two)
    assert first.command.startswith(f"{Path(sys.executable).name} ")
    assert begin - 1 < first.since <= second.since < time.time() + 1


def test_listing_makes_no_folder(folder: Path) -> None:
    assert live_leases() == []
    assert not folder.exists()


def test_the_file_is_json_of_version_1(start: Start, folder: Path) -> None:
    start(LOADMASTER_LOCAL_SIZE="2", LOADMASTER_LOCAL_RANK="1", LOADMASTER_GROUP="a run").join(EIGHT, 1.5, None, 4.5)
    (path,) = folder.glob("lease.*")
    document = json.loads(path.read_text())
    group = document["group"]["id"]
    assert path.name.startswith(f"lease.{group}.1.")
    assert document["command"].startswith(Path(sys.executable).name)
    for changing in ("pid", "command", "since", "started"):
        del document[changing]
    assert document == {
        "version": 1,
        "weight": 1.5,
        "cpus": "0-7",
        "cores": "0-7",
        "quotas": [{"id": "a test", "cpus": 4}],
        "group": {"id": group, "ranks": 2, "member": "1"},
        "threads": None,
        "at_most": 16,
    }

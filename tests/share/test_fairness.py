from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.share.fairness import Claim, Group, Quota, divide_fairly


def claim(name: object, cores: Iterable[int], **more: object) -> Claim:
    return Claim(str(name), frozenset(cores), **more)  # type: ignore[arg-type]


def threads(*claims: Claim) -> list[int]:
    parts = divide_fairly(claims)
    return [parts[found.id].threads for found in claims]


def alike(count: int, cores: int, **more: object) -> list[Claim]:
    return [claim(name, range(cores), **more) for name in range(count)]


def rank(name: object, cores: Iterable[int], ranks: int, finished: int = 0, group: str = "group") -> Claim:
    return claim(name, cores, group=Group(group, ranks, finished))


# Examples


@pytest.mark.parametrize(
    ("processes", "cores", "each"), [(1, 6, 6), (2, 6, 3), (3, 6, 2), (4, 6, 1), (3, 8, 2), (2, 2, 1), (5, 2, 1)]
)
def test_equal_claims_get_equal_parts_rounded_down(processes: int, cores: int, each: int) -> None:
    assert threads(*alike(processes, cores)) == [each] * processes


def test_disjoint_masks_do_not_share() -> None:
    parts = divide_fairly([claim("a", range(4)), claim("b", range(4, 8)), claim("c", range(4, 8))])
    assert parts == {"a": (4, 1, 1), "b": (2, 2, 1), "c": (2, 2, 1)}


def test_what_a_narrow_mask_leaves_goes_to_the_wide_one() -> None:
    assert threads(claim("a", [0, 1]), claim("b", [0, 1]), claim("c", range(8))) == [1, 1, 6]


def test_masks_that_overlap_in_a_row() -> None:
    assert threads(claim("a", range(6)), claim("b", range(4, 10)), claim("c", range(8, 14))) == [4, 4, 4]
    assert threads(claim("a", range(2)), claim("b", range(1, 4)), claim("c", range(3, 12))) == [2, 2, 8]


def test_more_processes_than_cores_get_one_each_and_leave_the_others_alone() -> None:
    crowded = [claim(name, [0]) for name in range(3)]
    assert threads(*crowded, claim("other", range(1, 8))) == [1, 1, 1, 7]
    assert threads(*crowded, claim("over all", range(8))) == [1, 1, 1, 5]


def test_a_quota_limits_only_those_inside() -> None:
    quota = (Quota("container", 5),)
    inside = [claim(name, range(8), quotas=quota) for name in "ab"]
    assert threads(*inside, claim("c", range(8))) == [2, 2, 4]
    assert threads(*inside) == [2, 2]
    two = [claim(name, range(8), quotas=(Quota(name, 3),)) for name in "ab"]
    assert threads(*two) == [3, 3]


def test_a_quota_of_the_pod_binds_containers_together() -> None:
    pod = Quota("pod", 6)
    claims = [claim(name, range(16), quotas=(Quota(name, 4), pod)) for name in "ab"]
    assert threads(*claims, claim("c", range(16))) == [3, 3, 10]


def test_a_quota_that_never_binds_joins_nobody() -> None:
    wide = (Quota("machine", 100),)
    parts = divide_fairly([claim("a", range(4), quotas=wide), claim("b", range(4, 8), quotas=wide)])
    assert {part.processes for part in parts.values()} == {1}


def test_weights() -> None:
    assert threads(claim("a", range(8), weight=3.0), claim("b", range(8))) == [6, 2]
    assert threads(claim("a", range(6), weight=1 / 3), claim("b", range(6), weight=2 / 3)) == [2, 4]
    assert threads(claim("a", range(4), weight=1e-300), claim("b", range(4), weight=1e300)) == [1, 3]


def test_what_a_claim_cannot_use_goes_to_the_others() -> None:
    assert threads(claim("a", range(8), at_most=1), claim("b", range(8))) == [1, 7]


def test_who_asked_for_a_number_has_it_and_the_others_share_the_rest() -> None:
    assert threads(claim("a", range(8), threads=6), claim("b", range(8))) == [6, 2]
    assert threads(claim("a", range(8), threads=1), claim("b", range(8)), claim("c", range(8))) == [1, 3, 3]
    assert threads(claim("a", range(8), threads=60), claim("b", range(8))) == [60, 1]


def test_declared_ranks_count_before_they_come_and_no_more_when_they_have_ended() -> None:
    assert divide_fairly([rank("a", range(6), 4)]) == {"a": (1, 4, 4)}
    assert divide_fairly([rank("a", range(8), 4), rank("b", range(8), 4)])["a"] == (2, 4, 4)
    assert divide_fairly([rank("a", range(8), 4, finished=2), rank("b", range(8), 4, finished=2)])["a"] == (4, 2, 2)
    assert divide_fairly([rank("a", range(8), 2), claim("b", range(8))]) == {"a": (2, 3, 2), "b": (2, 3, 1)}


def test_more_live_ranks_than_declared_all_count() -> None:
    assert threads(*[rank(name, range(6), 2) for name in range(3)]) == [2, 2, 2]


def test_ranks_bound_to_cores_of_their_own_do_not_share_once_all_are_there() -> None:
    bound = [rank(name, range(4 * name, 4 * name + 4), 4) for name in range(4)]
    assert threads(*bound[:1]) == [1]
    assert threads(*bound) == [4, 4, 4, 4]


# Invariants

cores = st.frozensets(st.integers(0, 9), min_size=1)
quotas = st.lists(st.builds(Quota, st.sampled_from("pq"), st.integers(1, 12)), max_size=2, unique_by=lambda q: q.id)
groups = st.none() | st.builds(Group, st.sampled_from("gh"), st.integers(1, 5), st.integers(0, 3))
weights = st.sampled_from([1.0, 1.0, 0.5, 2.0, 3.0]) | st.floats(0.01, 50)


@st.composite
def claim_lists(draw: st.DrawFn, weight: st.SearchStrategy[float] = weights, follow: bool = False) -> list[Claim]:
    count = draw(st.integers(1, 7))
    return [
        Claim(
            f"lease{number}",
            draw(cores),
            draw(weight),
            tuple(draw(quotas)),
            draw(groups),
            None if follow else draw(st.none() | st.integers(1, 4)),
            draw(st.none() | st.integers(1, 12)),
        )
        for number in range(count)
    ]


def connected(claims: Sequence[Claim]) -> list[list[Claim]]:
    """The claims in sets that have no core in common."""
    sets: list[list[Claim]] = []
    for found in claims:
        met = [together for together in sets if any(found.cores & other.cores for other in together)]
        sets = [together for together in sets if together not in met] + [[found, *itertools.chain(*met)]]
    return sets


@given(claim_lists(), st.randoms(use_true_random=False))
def test_the_order_does_not_matter(claims: list[Claim], shuffler: random.Random) -> None:
    expected = divide_fairly(claims)
    shuffler.shuffle(claims)
    assert divide_fairly(claims) == expected


@given(claim_lists())
def test_no_live_lease_gets_nothing_and_none_more_than_it_can_use(claims: list[Claim]) -> None:
    parts = divide_fairly(claims)
    for found in claims:
        given_threads = parts[found.id].threads
        if found.threads is None:
            assert 1 <= given_threads <= min(len(found.cores), found.at_most or 12)
        else:
            assert given_threads == found.threads


@given(claim_lists(follow=True))
def test_the_sum_is_at_most_the_cores_while_processes_are_no_more_than_cores(claims: list[Claim]) -> None:
    claims = [found._replace(group=None) for found in claims]
    parts = divide_fairly(claims)
    for together in connected(claims):
        used = sum(parts[found.id].threads for found in together)
        assert used <= max(len(frozenset().union(*(found.cores for found in together))), len(together))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_ranks_that_were_declared_divide_by_what_is_declared_or_live(
    cores: int, ranks: int, live: int, others: int
) -> None:
    live = max(1, min(live, ranks))
    claims = [rank(f"rank{number}", range(cores), ranks) for number in range(live)]
    claims += [claim(f"other{number}", range(cores)) for number in range(others)]
    processes = ranks + others
    assert set(threads(*claims)) == {max(1, cores // processes)}
    assert all(part.processes == processes for part in divide_fairly(claims).values())


@given(claim_lists(follow=True))
def test_a_quota_holds_while_processes_inside_are_no_more_than_it(claims: list[Claim]) -> None:
    claims = [found._replace(group=None) for found in claims]
    parts = divide_fairly(claims)
    for name in {quota.id for found in claims for quota in found.quotas}:
        inside = [found for found in claims if any(quota.id == name for quota in found.quotas)]
        allowed = min(quota.cpus for found in inside for quota in found.quotas if quota.id == name)
        if allowed < len(frozenset().union(*(found.cores for found in inside))):
            assert sum(parts[found.id].threads for found in inside) <= max(allowed, len(inside))


@given(claim_lists())
def test_claims_that_are_alike_get_the_same(claims: list[Claim]) -> None:
    claims += [found._replace(id=f"twin of {found.id}", group=None) for found in claims if found.group is None]
    parts = divide_fairly(claims)
    for found in claims:
        if found.group is None and not found.id.startswith("twin"):
            assert parts[found.id].threads == parts[f"twin of {found.id}"].threads


@given(claim_lists(), claim_lists())
def test_those_without_a_core_or_quota_in_common_do_not_matter(here: list[Claim], there: list[Claim]) -> None:
    far = [
        found._replace(
            id=f"far {found.id}",
            cores=frozenset(core + 100 for core in found.cores),
            quotas=tuple(Quota(f"far {quota.id}", quota.cpus) for quota in found.quotas),
            group=None,
        )
        for found in there
    ]
    together = divide_fairly([*here, *far])
    assert {found.id: together[found.id] for found in here} == divide_fairly(here)


def fits(claims: Sequence[Claim], parts: Sequence[int]) -> bool:
    """Whether every set of claims finds room on the cores that any of them may use, and in its quotas."""
    for size in range(1, len(claims) + 1):
        for chosen in itertools.combinations(range(len(claims)), size):
            room = frozenset().union(*(claims[i].cores for i in chosen))
            if sum(parts[i] for i in chosen) > len(room):
                return False
    names = {quota.id for found in claims for quota in found.quotas}
    for name in names:
        inside = [i for i, found in enumerate(claims) if any(quota.id == name for quota in found.quotas)]
        allowed = min(quota.cpus for found in claims for quota in found.quotas if quota.id == name)
        if sum(parts[i] for i in inside) > allowed:
            return False
    return True


@given(claim_lists(weight=st.just(1.0), follow=True))
def test_the_parts_are_max_min_fair(claims: list[Claim]) -> None:
    """All that have the same could not have one more, as long as those that have less keep what they have."""
    claims = [found._replace(group=None) for found in claims]
    if not fits(claims, [1] * len(claims)):
        return
    parts = threads(*claims)
    assert fits(claims, parts)
    most = [min(len(found.cores), found.at_most or 12) for found in claims]
    for level in {part for part, top in zip(parts, most, strict=True) if part < top}:
        raised = [min(part + (part == level < top), level + 1) for part, top in zip(parts, most, strict=True)]
        assert not fits(claims, raised)


# Speed


def best_seconds(claims: list[Claim]) -> float:
    def once() -> float:
        start = time.perf_counter()
        divide_fairly(claims)
        return time.perf_counter() - start

    return min(once() for _ in range(20))


@pytest.mark.parametrize(
    "claims",
    [
        pytest.param(alike(8, 64), id="alike"),
        pytest.param([claim(i, range(4 * i, 64)) for i in range(8)], id="nested masks"),
        pytest.param([claim(i, range(64), weight=i + 1.0) for i in range(8)], id="weights"),
    ],
)
def test_8_leases_on_64_cores_take_a_millisecond_or_so(claims: list[Claim]) -> None:
    assert best_seconds(claims) < 0.004  # several times what is wanted: other work may be going on


@pytest.mark.parametrize(
    "claims",
    [
        pytest.param(alike(512, 64), id="crowded"),
        pytest.param(alike(512, 512), id="one each"),
        pytest.param([claim(i, [i]) for i in range(512)], id="disjoint"),
    ],
)
def test_512_leases_take_a_few_milliseconds(claims: list[Claim]) -> None:
    assert best_seconds(claims) < 0.06

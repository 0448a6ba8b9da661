"""Divides cores among the processes that load: whole numbers, max-min fair, and the same for every observer.

    claims -> kinds (alike in all that counts) -> limits (cores in common, quotas) -> levels -> threads

All start at one thread and rise together, each by its weight. Where a set of processes cannot rise any further (its
cores or its quota are used up) it stays, and the others go on. So what a quota or a mask keeps from some goes to the
others. A step that not all of a set can take is taken by none of it: equal claims get equal parts, ``n // k`` of n
cores, and a remainder is left idle, since a team waits for its slowest member and a part that moves about helps nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["MAX_WEIGHT", "Claim", "Group", "Part", "Quota", "divide_fairly"]

MAX_WEIGHT = 1024.0
"""Weights count within this and its reciprocal, in steps of the latter."""

_UNIT = 1024
_SHIFT = 30  # a level counts in 1 / 2**20 of a thread for a weight of 1


class Quota(NamedTuple):
    """CPU time that several processes have in common: who else has it is told by ``id``; whole ``cpus``, at least 1."""

    id: str
    cpus: int


class Group(NamedTuple):
    """Ranks that one launcher started on this host.

    Attributes
    ----------
    id
        The same for all ranks of the group, and for no other.
    ranks
        How many the launcher declared.
    finished
        How many of them have been live and are no more.
    """

    id: str
    ranks: int
    finished: int = 0


class Claim(NamedTuple):
    """What one live lease asks for.

    Attributes
    ----------
    id
        Different for every claim.
    cores
        Names of the cores that the process may use, at least one.
    weight
        More than 0; twice the weight is twice the part.
    quotas
        Those of all levels of its control group, and other bounds that it has in common with others.
    group
        The ranks it belongs to, where a launcher declared them; those not yet live count as well.
    threads
        What its user asked for, which is given whatever the neighbours; None where it follows.
    at_most
        What it can use at the most; None for no bound.
    """

    id: str
    cores: frozenset[int]
    weight: float = 1.0
    quotas: tuple[Quota, ...] = ()
    group: Group | None = None
    threads: int | None = None
    at_most: int | None = None


class Part(NamedTuple):
    """What one claim gets.

    Attributes
    ----------
    threads
        At least 1.
    processes
        How many share the cores, directly or through others, this one and ranks that are still to come included.
    ranks
        How many of those are of its own group.
    """

    threads: int
    processes: int
    ranks: int


class _Kind(NamedTuple):
    """Claims that are alike, and so get the same. ``most`` is ``least`` for those that do not follow."""

    cores: frozenset[int]
    quotas: frozenset[Quota]
    weight: int
    least: int
    most: int

    def rank(self) -> tuple[object, ...]:
        """An order that does not depend on who came first."""
        return sorted(self.cores), sorted(self.quotas), self[2:]


class _Limit(NamedTuple):
    """Kinds, by number, that together get no more than so many threads."""

    kinds: Sequence[int]
    threads: int


def divide_fairly(claims: Iterable[Claim]) -> dict[str, Part]:
    """Return what each claim gets, by its id.

    - Everyone gets at least 1. Processes whose cores overlap, directly or through others, together get at most those
      cores while they are no more than the cores; those inside a quota at most the quota, likewise.
    - Processes that have no core and no quota in common do not matter to each other.
    - Declared ranks that are still to come count like their siblings. They may run wherever one of those may.
    - Who asked for a number gets it, and the others share what is left, at least 1 each.

    The order of the claims does not matter.
    """
    same: dict[frozenset[int], frozenset[int]] = {}  # equal sets as one object: they are compared again and again
    listed = [claim._replace(cores=same.setdefault(claim.cores, claim.cores)) for claim in claims]
    binding = _binding_quotas(listed)
    kinds = [_kind(claim, binding) for claim in listed]
    awaited = _awaited(listed, kinds)
    counts = Counter(kinds)
    counts.update(kind for kind, ranks in awaited.values() for _ in range(ranks))
    groups = Counter(claim.group.id for claim in listed if claim.group is not None)
    parts: dict[str, Part] = {}
    found: dict[_Kind, tuple[int, int]] = {}
    for together in _connected(counts):
        processes = sum(counts[kind] for kind in together)
        for kind, threads in _fill(together, counts).items():
            found[kind] = threads, processes
    for claim, kind in zip(listed, kinds, strict=True):
        threads, processes = found[kind]
        group = claim.group
        ranks = 1 if group is None else groups[group.id] + awaited[group.id][1]
        parts[claim.id] = Part(threads, processes, min(ranks, processes))
    return parts


def _binding_quotas(claims: Iterable[Claim]) -> set[str]:
    """Names of the quotas that are less than the cores of those inside."""
    allowed: dict[str, int] = {}
    inside: dict[str, set[frozenset[int]]] = {}
    for claim in claims:
        for name, cpus in claim.quotas:
            allowed[name] = min(cpus, allowed.get(name, cpus))
            inside.setdefault(name, set()).add(claim.cores)
    return {name for name, sets in inside.items() if allowed[name] < len(frozenset().union(*sets))}


def _kind(claim: Claim, binding: set[str]) -> _Kind:
    quotas = frozenset(quota for quota in claim.quotas if quota.id in binding)
    weight = max(1, round(min(claim.weight, MAX_WEIGHT) * _UNIT))
    if claim.threads is not None:
        return _Kind(claim.cores, quotas, weight, claim.threads, claim.threads)
    most = len(claim.cores) if claim.at_most is None else min(claim.at_most, len(claim.cores))
    return _Kind(claim.cores, quotas, weight, 1, max(1, most))


def _awaited(claims: Sequence[Claim], kinds: Sequence[_Kind]) -> dict[str, tuple[_Kind, int]]:
    """Group -> what its ranks that are still to come ask for, and how many they are."""
    members: dict[str, list[tuple[Group, _Kind]]] = {}
    for claim, kind in zip(claims, kinds, strict=True):
        if claim.group is not None:
            members.setdefault(claim.group.id, []).append((claim.group, kind))
    awaited = {}
    for name, group in members.items():
        declared = max(stated.ranks for stated, _ in group)
        finished = max(stated.finished for stated, _ in group)
        seen = {kind for _, kind in group}
        cores = frozenset().union(*(kind.cores for kind in seen))
        quotas = frozenset.intersection(*(kind.quotas for kind in seen))
        following = [kind for kind in seen if kind.most > kind.least] or list(seen)
        weight = max(kind.weight for kind in following)
        kind = _Kind(cores, quotas, weight, 1, min(len(cores), max(kind.most for kind in following)))
        awaited[name] = kind, max(0, declared - len(group) - finished)
    return awaited


def _connected(counts: Mapping[_Kind, int]) -> list[list[_Kind]]:
    """The kinds in sets that have neither a core nor a quota in common with each other."""
    sets: dict[object, list[_Kind]] = {}  # core or name of a quota -> the set that it belongs to
    for kind in counts:
        own = [kind]
        keys: list[object] = [*kind.cores, *(quota.id for quota in kind.quotas)]
        met = {id(found): found for key in keys if (found := sets.get(key)) is not None}
        for found in met.values():
            own += found
        if len(met) == 1:  # the usual case: nothing to join, and nothing to be told but what is new
            (found,) = met.values()
            found.append(kind)
            for key in keys:
                sets[key] = found
            continue
        for member in own:
            for key in (*member.cores, *(quota.id for quota in member.quotas)):
                sets[key] = own
    return list({id(found): found for found in sets.values()}.values())


def _fill(kinds: list[_Kind], counts: Mapping[_Kind, int]) -> dict[_Kind, int]:
    """Return the threads of each of these kinds."""
    if len(kinds) == 1:
        (kind,) = kinds
        room = min([len(kind.cores), *(quota.cpus for quota in kind.quotas)])
        return {kind: max(kind.least, min(kind.most, room // counts[kind]))}
    kinds = sorted(kinds, key=_Kind.rank)
    rising = _Rising(kinds, [counts[kind] for kind in kinds])
    return dict(zip(kinds, rising.run(), strict=True))


class _Rising:
    """The kinds of one connected set while they rise."""

    def __init__(self, kinds: Sequence[_Kind], counts: Sequence[int]) -> None:
        self.kinds = kinds
        self.counts = counts
        self.fixed: list[int | None] = [kind.least if kind.most <= kind.least else None for kind in kinds]
        self.limits = self._quota_limits()
        self.places: dict[frozenset[int], int] = {}  # cores by the kinds that may use them -> how many
        for together in self._core_sets():
            cores = frozenset().union(*(kinds[i].cores for i in together))
            self._limit(together, len(cores))
            if self._least(together) >= len(cores):
                self._stay(together)
            elif len({kinds[i].cores for i in together}) > 1:
                users: dict[int, list[int]] = {}
                for i in together:
                    for core in kinds[i].cores:
                        users.setdefault(core, []).append(i)
                self.places.update(Counter(frozenset(found) for found in users.values()))

    def run(self) -> list[int]:
        top = (max(kind.most for kind in self.kinds) << _SHIFT) // min(kind.weight for kind in self.kinds) + 1
        level = 0
        while None in self.fixed:
            level = _last(level, top, self._fits)
            parts = self._parts(level)
            if self._cut(parts):
                level = 0
                continue
            above = self._parts(level + 1)
            self._cut(above)
            full = self._full(parts, above)
            for i, fixed in enumerate(self.fixed):
                if fixed is None and (i in full or level >= top or parts[i] == self.kinds[i].most):
                    self.fixed[i] = parts[i]
        return self._parts(level)

    def _full(self, parts: Sequence[int], above: Sequence[int]) -> set[int]:
        """The kinds that the step up is too much for: of the limits that it breaks, those of the one met first."""
        met: dict[float, set[int]] = {}
        for limit in self.limits:
            if self._sum(above, limit) > limit.threads:
                rising = [i for i in limit.kinds if above[i] > parts[i]]
                room = limit.threads - sum(parts[i] * self.counts[i] for i in limit.kinds if i not in rising)
                step = room / sum(self.kinds[i].weight * self.counts[i] for i in rising)
                met.setdefault(step, set()).update(limit.kinds)
        return met[min(met)] if met else set()

    def _parts(self, level: int) -> list[int]:
        return [
            max(kind.least, min(kind.most, kind.weight * level >> _SHIFT)) if fixed is None else fixed
            for kind, fixed in zip(self.kinds, self.fixed, strict=True)
        ]

    def _fits(self, level: int) -> bool:
        parts = self._parts(level)
        return all(self._sum(parts, limit) <= limit.threads for limit in self.limits)

    def _sum(self, parts: Sequence[int], limit: _Limit) -> int:
        return sum(parts[i] * self.counts[i] for i in limit.kinds)

    def _limit(self, kinds: Sequence[int], threads: int) -> None:
        """Add a limit; it never takes the least from anyone."""
        limit = _Limit(kinds, max(threads, self._least(kinds)))
        if limit not in self.limits:
            self.limits.append(limit)

    def _least(self, kinds: Iterable[int]) -> int:
        return sum(self.kinds[i].least * self.counts[i] for i in kinds)

    def _stay(self, kinds: Iterable[int]) -> None:
        for i in kinds:
            self.fixed[i] = self.kinds[i].least

    def _quota_limits(self) -> list[_Limit]:
        self.limits = []
        names: dict[str, dict[int, int]] = {}
        for i, kind in enumerate(self.kinds):
            for quota in kind.quotas:
                inside = names.setdefault(quota.id, {})
                inside[i] = min(quota.cpus, inside.get(i, quota.cpus))
        for inside in names.values():
            self._limit(list(inside), min(inside.values()))  # a quota that has just been changed: the lower one counts
        return self.limits

    def _core_sets(self) -> list[list[int]]:
        """Kinds whose cores overlap, directly or through others; quotas join nothing here."""
        bare = {kind: kind._replace(quotas=frozenset()) for kind in self.kinds}
        members: dict[_Kind, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            members.setdefault(bare[kind], []).append(i)
        return [[i for kind in found for i in members[kind]] for found in _connected(dict.fromkeys(members, 1))]

    def _cut(self, parts: Sequence[int]) -> bool:
        """Whether some kinds do not find room on their cores; then a limit is added that says so."""
        crowded = _crowded([part * count for part, count in zip(parts, self.counts, strict=True)], self.places)
        if not crowded:
            return False
        room = sum(number for users, number in self.places.items() if users & crowded)
        self._limit(sorted(crowded), room)
        if self._least(crowded) >= room:  # these cores are theirs alone
            self._stay(crowded)
            bare = frozenset().union(*self.places)
            self.places = {users: number for users, number in self.places.items() if not users & crowded}
            self._stay(bare.difference(*self.places))
        return True


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The highest level that fits, of which ``low`` is known to be one."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _crowded(wanted: Sequence[int], places: Mapping[frozenset[int], int]) -> set[int]:
    """Return kinds that together want more than the cores that any of them may use; empty where all find room.

    A flow from kinds to cores, raised along augmenting paths: those that an unsatisfied kind can reach are crowded.
    """
    left = dict(places)
    order = sorted(places, key=lambda users: (len(users), sorted(users)))
    reach = {i: [users for users in order if i in users] for i in {i for users in order for i in users}}
    given: dict[tuple[int, frozenset[int]], int] = {}
    for i in sorted(reach, key=lambda i: (len(reach[i]), i)):
        missing = wanted[i]
        while missing:
            path, met = _path(i, reach, left, given)
            if not path:
                return met
            amount = min([missing, left[path[-1][1]], *(given[j, users] for j, users in path[1::2])])
            for step, edge in enumerate(path):
                given[edge] = given.get(edge, 0) + (amount if step % 2 == 0 else -amount)
            left[path[-1][1]] -= amount
            missing -= amount
    return set()


def _path(
    start: int,
    reach: Mapping[int, Sequence[frozenset[int]]],
    left: Mapping[frozenset[int], int],
    given: Mapping[tuple[int, frozenset[int]], int],
) -> tuple[list[tuple[int, frozenset[int]]], set[int]]:
    """Edges to a place with room, by turns to be raised and to be lowered, or none; and the kinds that were met."""
    came: dict[frozenset[int], int] = {}
    through: dict[int, frozenset[int]] = {}
    met = {start}
    queue = [start]
    for i in queue:
        for place in reach[i]:
            if place in came:
                continue
            came[place] = i
            if left[place]:
                path = [(i, place)]
                while i != start:
                    place = through[i]
                    path += [(i, place), (came[place], place)]
                    i = came[place]
                return path[::-1], met
            for j in place:
                if j not in met and given.get((j, place)):
                    met.add(j)
                    through[j] = place
                    queue.append(j)
    return [], met

"""Fetchers as Monarch actors.

    from loadmaster.launch.monarch import spawn_fetchers

    with spawn_fetchers(lm.CheckpointSource("ckpt/step-{version}"), procs=8) as fetchers:
        with fetchers.fetch(4) as weights:             in async code: await fetchers.afetch(4)
            model.load_state_dict(weights)

    this process                                            on this host, `procs` processes
    ------------                                            ------------------------------
    MonarchFetchers ----- fetch(version) ------------>      FetchActor 0 ... FetchActor procs - 1
    an actor that owns them: their death is told to it      in each: one FetchWorker
    and ends there, not in a fault of this process

A program that has a proc mesh of its own on this host can spawn `FetchActor` on it instead, call ``setup`` once and
``fetch`` for each version, and give the parts to `loadmaster.fetch.parts.weights_of`. It then owns the actors, and has
to handle their failures. Monarch is imported at the first use.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loadmaster.errors import InputError, MissingDependencyError
from loadmaster.fetch.source import Source
from loadmaster.fetch.worker import FetchedPart
from loadmaster.launch.actors import (
    DEFAULT_PROCS,
    FETCH_SECONDS,
    NOT_STARTED,
    START_SECONDS,
    ActorFetchers,
    actor_environments,
    actor_worker,
    answers_of,
    check_actor_request,
    end_in_time,
    run_here,
)
from loadmaster.share import Share

__all__ = ["FetchActor", "MonarchFetchers", "aspawn_fetchers", "spawn_fetchers"]

if TYPE_CHECKING:
    FetchActor: Any

_log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


def spawn_fetchers(
    source: Source, procs: int = DEFAULT_PROCS, *, timeout_seconds: float = FETCH_SECONDS
) -> MonarchFetchers:
    """Start ``procs`` processes on this host, one actor in each, set up and ready to fetch.

    Parameters
    ----------
    source : Source
        Where the weights come from; see `loadmaster.fetch.source`. Monarch pickles it.
    procs : int
        Number of processes.
    timeout_seconds : float
        How long a version may take before its fetch is given up.

    Raises
    ------
    MissingDependencyError
        Monarch is not installed.
    InputError
        ``procs`` is no positive integer, ``source`` is no source, or this thread runs an event loop.
    FetchError
        The actors could not be started; names the fetcher and the cause.
    """
    return run_here(aspawn_fetchers(source, procs, timeout_seconds=timeout_seconds), "await aspawn_fetchers")


async def aspawn_fetchers(
    source: Source, procs: int = DEFAULT_PROCS, *, timeout_seconds: float = FETCH_SECONDS
) -> MonarchFetchers:
    """Start as `spawn_fetchers`, without blocking the event loop."""
    monarch = _monarch()
    check_actor_request(source, procs)
    environments = actor_environments(procs)
    owner = monarch.this_proc().spawn("loadmaster_owner", _owner_class())
    try:
        begun = owner.begin.call_one(source, environments)
    except Exception as refused:
        await end_in_time(_stop(owner))
        raise InputError(f"the source {type(source).__name__} cannot be sent to the fetchers: {refused}") from refused
    fetchers: MonarchFetchers | None = None
    try:
        (actors,) = await answers_of(NOT_STARTED, [begun], [], START_SECONDS, who="the actor that starts them")
        each = [actors.slice(procs=number) for number in range(procs)]
        pids = await answers_of(NOT_STARTED, [actor.process.call_one() for actor in each], [], START_SECONDS)
        fetchers = MonarchFetchers(owner, each, pids, timeout_seconds)
        await fetchers.set_up()
    except BaseException:
        await asyncio.shield(end_in_time(_stop(owner)) if fetchers is None else fetchers.aclose())
        raise
    return fetchers


class MonarchFetchers(ActorFetchers):
    """Fetchers that Monarch runs; made by `spawn_fetchers`."""

    def __init__(self, owner: Any, actors: Sequence[Any], pids: Sequence[int], timeout_seconds: float) -> None:
        super().__init__(pids, timeout_seconds)
        self._owner = owner
        self._actors = actors

    def _ask(self, fetcher: int, method: str, *arguments: Any) -> Awaitable[Any]:
        return getattr(self._actors[fetcher], method).call_one(*arguments)  # type: ignore[no-any-return]

    async def _stop(self) -> None:
        await _stop(self._owner)


async def _stop(owner: Any) -> None:
    """End the processes, and then the actor that owns them."""
    try:
        await owner.end.call_one()
    finally:
        await owner.stop()


def _monarch() -> Any:
    """The module ``monarch.actor``, or one sentence with the command that installs it."""
    try:
        return importlib.import_module("monarch.actor")
    except ModuleNotFoundError as missing:
        if missing.name not in ("monarch", "monarch.actor"):
            raise
        raise MissingDependencyError(
            "Monarch is not installed, and this needs it: pip install 'loadmaster[monarch]'"
        ) from None


@functools.cache
def _fetch_actor_class() -> Any:
    monarch = _monarch()
    actor: Any = monarch.Actor
    endpoint: Callable[[_F], _F] = monarch.endpoint

    class FetchActor(actor):  # type: ignore[misc]
        """A fetcher as a Monarch actor, in a process of its own; its number is its rank in the mesh.

        Parameters
        ----------
        source : Source
            Where the weights come from.
        environments : sequence of mapping, optional
            What each fetcher has to find in its environment; see `loadmaster.fetch.parts.actor_environments`.
        """

        def __init__(self, source: Source, environments: Sequence[Mapping[str, str]] = ()) -> None:
            point = monarch.current_rank()
            environment = environments[point.rank] if environments else None
            self._worker = actor_worker(source, point.rank, point.extent.nelements, environment)

        @endpoint
        def setup(self) -> Share:
            """Take this process's share of the host, once; a repeat changes nothing."""
            return self._worker.setup()

        @endpoint
        def fetch(self, version: int | None = None) -> FetchedPart:
            """Fetch this fetcher's part of ``version`` into memory of its own, and return handles to it."""
            return self._worker.fetch(version)

        @endpoint
        def process(self) -> int:
            """The number of this actor's process."""
            return os.getpid()

    return _importable(FetchActor, "FetchActor")


@functools.cache
def _owner_class() -> Any:
    monarch = _monarch()
    actor: Any = monarch.Actor
    endpoint: Callable[[_F], _F] = monarch.endpoint

    class Owner(actor):  # type: ignore[misc]
        """Owns the processes of the fetchers, in the process of who asked for them.

        Monarch tells the owner of a process of its death, and ends a program that does not handle it. Here it is
        handled: whoever waits for a fetcher sees for himself that it is gone.
        """

        def __init__(self) -> None:
            self._procs: Any = None

        @endpoint
        async def begin(self, source: Source, environments: Sequence[Mapping[str, str]]) -> Any:
            """Start a process for each of ``environments``, and an actor in each."""
            self._procs = monarch.this_host().spawn_procs(
                per_host={"procs": len(environments)}, name="loadmaster_fetchers"
            )
            actors = self._procs.spawn("loadmaster_fetch", _fetch_actor_class(), source, environments)
            await actors.initialized
            return actors

        @endpoint
        async def end(self) -> None:
            """End the processes."""
            procs, self._procs = self._procs, None
            if procs is not None:
                await procs.stop()

        def __supervise__(self, failure: Any) -> bool:
            _log.info("Monarch tells of the fetchers: %s", failure)
            return True

    return _importable(Owner, "_Owner")


def _importable(actor: Any, name: str) -> Any:
    """Give a class the name by which `__getattr__` finds it, so that it is pickled by that name."""
    actor.__qualname__ = actor.__name__ = name
    return actor


def __getattr__(name: str) -> Any:
    """Make the actors, which derive from a class of Monarch, when they are first asked for."""
    makers = {"FetchActor": _fetch_actor_class, "_Owner": _owner_class}
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return makers[name]()

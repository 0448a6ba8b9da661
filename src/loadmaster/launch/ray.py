"""Fetchers as Ray actors.

    from loadmaster.launch.ray import spawn_fetchers

    with spawn_fetchers(lm.CheckpointSource("ckpt/step-{version}"), procs=8) as fetchers:
        with fetchers.fetch(4) as weights:             in async code: await fetchers.afetch(4)
            model.load_state_dict(weights)

The actors are pinned to the node of this process, whose memory they share, and ask Ray for no CPUs: they take their
share of the host while they fetch, and nothing in between. Ray is imported at the first use, and has to be connected:
``ray.init`` is the caller's.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

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

__all__ = ["FetchActor", "RayFetchers", "aspawn_fetchers", "spawn_fetchers"]


def spawn_fetchers(
    source: Source, procs: int = DEFAULT_PROCS, *, timeout_seconds: float = FETCH_SECONDS
) -> RayFetchers:
    """Start ``procs`` actors on this node, set up and ready to fetch.

    Parameters
    ----------
    source : Source
        Where the weights come from; see `loadmaster.fetch.source`. Ray pickles it.
    procs : int
        Number of actors, each in a process of its own.
    timeout_seconds : float
        How long a version may take before its fetch is given up.

    Raises
    ------
    MissingDependencyError
        Ray is not installed.
    InputError
        Ray is not connected, ``procs`` is no positive integer, ``source`` is no source, or this thread runs an event
        loop.
    FetchError
        The actors could not be started; names the fetcher and the cause.
    """
    return run_here(aspawn_fetchers(source, procs, timeout_seconds=timeout_seconds), "await aspawn_fetchers")


async def aspawn_fetchers(
    source: Source, procs: int = DEFAULT_PROCS, *, timeout_seconds: float = FETCH_SECONDS
) -> RayFetchers:
    """Start as `spawn_fetchers`, without blocking the event loop."""
    ray = _ray()
    check_actor_request(source, procs)
    if not ray.is_initialized():
        raise InputError("Ray is not connected in this process; call ray.init() before the fetchers are started")
    actors: list[Any] = []
    fetchers: RayFetchers | None = None
    try:
        _start(ray, actors, source, procs)
        pids = await answers_of(NOT_STARTED, [actor.process.remote() for actor in actors], [], START_SECONDS)
        fetchers = RayFetchers(actors, pids, timeout_seconds)
        await fetchers.set_up()
    except BaseException:
        await asyncio.shield(end_in_time(_kill(actors)) if fetchers is None else fetchers.aclose())
        raise
    return fetchers


def _start(ray: Any, actors: list[Any], source: Source, procs: int) -> None:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy=here)(FetchActor)
    try:
        for number, environment in enumerate(actor_environments(procs)):
            actors.append(remote.remote(source, number, procs, environment))
    except TypeError as refused:
        raise InputError(f"the source {type(source).__name__} cannot be sent to the fetchers: {refused}") from refused


class RayFetchers(ActorFetchers):
    """Fetchers that Ray runs; made by `spawn_fetchers`."""

    def __init__(self, actors: Sequence[Any], pids: Sequence[int], timeout_seconds: float) -> None:
        super().__init__(pids, timeout_seconds)
        self._actors = actors

    def _ask(self, fetcher: int, method: str, *arguments: Any) -> Awaitable[Any]:
        return getattr(self._actors[fetcher], method).remote(*arguments)  # type: ignore[no-any-return]

    async def _stop(self) -> None:
        await _kill(self._actors)


async def _kill(actors: Sequence[Any]) -> None:
    ray = _ray()
    for actor in actors:
        ray.kill(actor, no_restart=True)


class FetchActor:
    """A fetcher as an actor: ``ray.remote(num_cpus=0)(FetchActor)`` is one of Ray.

    Parameters
    ----------
    source : Source
        Where the weights come from.
    fetcher, fetchers : int
        The number of this fetcher, from 0, and how many there are on this node.
    environment : mapping, optional
        What it has to find in its environment; see `loadmaster.fetch.parts.actor_environments`.
    """

    def __init__(
        self, source: Source, fetcher: int, fetchers: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._worker = actor_worker(source, fetcher, fetchers, environment)

    def setup(self) -> Share:
        """Take this process's share of the node, once; a repeat changes nothing."""
        return self._worker.setup()

    def fetch(self, version: int | None = None) -> FetchedPart:
        """Fetch this fetcher's part of ``version`` into memory of its own, and return handles to it."""
        return self._worker.fetch(version)

    def process(self) -> int:
        """The number of this actor's process."""
        return os.getpid()


def _ray() -> Any:
    """The module ``ray``, or one sentence with the command that installs it."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise MissingDependencyError("Ray is not installed, and this needs it: pip install 'loadmaster[ray]'") from None

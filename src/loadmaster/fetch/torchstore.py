"""A store of tensors by key, such as torchstore, as a source: what a trainer puts there, version by version.

Nothing of torchstore is imported: any object will do that has these, each plain or ``async``::

    keys(prefix)                        the keys that begin so; None for all
    get(key)                            the tensor
    get(key, inplace_tensor=tensor)     optional: the same, into memory that is there
    meta(key)                           optional: something with .shape and .dtype, without the data

which are the names of torchstore's client and of the module ``torchstore`` itself (its API has no ``meta``).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loadmaster.errors import InputError, LoadmasterError
from loadmaster.fetch.source import SourceEntry, Waiter, check_tensor, source_entry, with_version

if TYPE_CHECKING:
    import torch

__all__ = ["POLICY_PREFIX", "TorchStoreSource"]

POLICY_PREFIX = "policy_ver_{version:010d}."
"""How the trainers of torchforge name the weights of a version: ``policy_ver_0000000007.model.norm.weight``."""


class TorchStoreSource:
    """The tensors that a key-value store holds under the prefix of a version; see the module.

    Each process has the store itself: a copy that pickle makes, a module by its name, or one that ``connect`` gives.
    Its ``async`` functions run in one event loop for each process, which is kept from call to call.

    A store without ``meta`` gives shape and dtype only with the data. So each tensor is got once to learn them, and
    they are remembered for all later versions: the weights of a policy keep their shapes. A tensor that comes in
    another shape or dtype later is an error.

    Parameters
    ----------
    store : object, optional
        The store, where it can be pickled, or a module with such functions, such as ``torchstore``.
    prefix : str
        What the keys of a version begin with, before the names; ``{version}`` as `str.format` takes it. A store whose
        tensors are overwritten in place has a prefix without it.
    connect : callable, optional
        Instead of ``store``: a function without arguments that returns it, called once in each process where it is
        first needed; it may be ``async``, such as ``torchstore.client``. It must be importable there by its name.
    leave_out : sequence of str
        Names that are no tensors: ``torchstore.put_state_dict`` keeps the structure of the state dict as ``MAPPING``.

    Raises
    ------
    InputError
        Neither or both of ``store`` and ``connect`` are given, or it has no ``keys`` and ``get``.
    LoadmasterError
        By the calls: the store has nothing for a version, or no tensor where one is needed, or one of another shape.
    """

    def __init__(
        self,
        store: Any = None,
        prefix: str = POLICY_PREFIX,
        *,
        connect: Callable[[], Any] | None = None,
        leave_out: Sequence[str] = ("MAPPING",),
    ) -> None:
        if (store is None) == (connect is None):
            raise InputError("TorchStoreSource needs a store, or connect= with a function that returns one")
        if store is not None:
            _check_store(store)
        self.prefix = prefix
        self.leave_out = tuple(leave_out)
        self._given = store
        self._connect = connect
        self._begin()

    def _begin(self) -> None:
        self._waiter = Waiter()
        self._store: Any = None
        self._version_prefix: str | None = None
        self._known: dict[str, SourceEntry] = {}
        self._held: tuple[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        module = self._given.__name__ if isinstance(self._given, ModuleType) else None
        return {
            "prefix": self.prefix,
            "leave_out": self.leave_out,
            "module": module,
            "store": self._given if module is None else None,
            "connect": self._connect,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self.leave_out = state["prefix"], state["leave_out"]
        self._given = state["store"] if state["module"] is None else importlib.import_module(state["module"])
        self._connect = state["connect"]
        self._begin()

    def names(self, version: int | None) -> list[str]:
        """List the keys of ``version`` and return them without their prefix.

        Raises
        ------
        LoadmasterError
            There are none.
        """
        prefix = with_version(self.prefix, version)
        names = [key[len(prefix) :] for key in self._keys(prefix)]
        names = [name for name in dict.fromkeys(names) if name and name not in self.leave_out]
        if not names:
            raise LoadmasterError(f"the store has no tensor whose key begins with {prefix!r}")
        self._version_prefix, self._held = prefix, None
        return names

    def entry(self, name: str) -> SourceEntry:
        """Shape and dtype: what the store says without the data, or those of the tensor when it was got first."""
        key = self._key(name)
        if hasattr(self._opened(), "meta"):
            return source_entry(self._waiter.result(self._opened().meta(key)), name)
        known = self._known.get(name)
        if known is None:
            value = self._get(key)
            known = self._known[name] = source_entry(value, name)
            self._held = key, value  # it is likely to be read next
        return known

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Get one tensor, straight into ``destination`` where the store can do that and says what it has.

        Raises
        ------
        LoadmasterError
            It has another shape or dtype.
        """
        key = self._key(name)
        wanted = source_entry(destination, name)
        store = self._opened()
        if hasattr(store, "meta") and _takes_tensor(store.get):
            _check_same(name, self.entry(name), wanted)
            value = self._waiter.result(store.get(key, inplace_tensor=destination))
            if value is None or value is destination:
                return
        else:
            value = self._take(key)
        check_tensor(name, value, wanted)
        if value.device != destination.device or value.data_ptr() != destination.data_ptr():
            destination.copy_(value.detach())

    def close(self) -> None:
        """Close what ``connect`` gave, where it can be closed, and the event loop."""
        store, self._store, self._held, self._version_prefix = self._store, None, None, None
        try:
            if self._connect is not None and callable(getattr(store, "close", None)):
                self._waiter.result(store.close())
        finally:
            self._waiter.close()

    def _opened(self) -> Any:
        if self._store is None:
            if self._connect is None:
                self._store = self._given
            else:
                store = self._waiter.result(self._connect())
                _check_store(store)
                self._store = store
        return self._store

    def _keys(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix``, each store asked in the way that it understands.

        torchstore matches whole words between dots, so that ``policy_ver_1.`` finds nothing and ``policy_ver_1`` what
        it should; for a prefix that ends elsewhere it is asked for all keys. A plain store takes the prefix as it is.
        """
        keys = self._opened().keys
        asked: list[str | None] = [prefix.removesuffix(".") or None]
        if not prefix.endswith(".") and prefix:
            asked.append(None)
        for prefix_asked in asked:
            found = [key for key in self._waiter.result(keys(prefix_asked)) if key.startswith(prefix)]
            if found:
                return found
        return []

    def _key(self, name: str) -> str:
        if self._version_prefix is None:
            raise InputError("TorchStoreSource: names(version) comes before all other calls")
        return self._version_prefix + name

    def _take(self, key: str) -> Any:
        """The tensor of ``key``: the one that its entry was learned from, or a new one."""
        held, self._held = self._held, None
        return held[1] if held is not None and held[0] == key else self._get(key)

    def _get(self, key: str) -> Any:
        from loadmaster.checkpoint.dtypes import import_torch

        value = self._waiter.result(self._opened().get(key))
        if not isinstance(value, import_torch().Tensor):
            raise LoadmasterError(
                f"the store has {type(value).__name__} as {key!r}, and a tensor is needed; name it in leave_out= if it "
                "is none"
            )
        return value


def _check_store(store: Any) -> None:
    missing = [name for name in ("keys", "get") if not callable(getattr(store, name, None))]
    if missing:
        raise InputError(f"{type(store).__name__} is no store of tensors: it lacks {' and '.join(missing)}")


def _takes_tensor(get: Callable[..., Any]) -> bool:
    """Whether ``get`` fills a tensor that is given; a second argument of another name may be a default."""
    try:
        return "inplace_tensor" in inspect.signature(get).parameters
    except (TypeError, ValueError):
        return False


def _check_same(name: str, found: SourceEntry, wanted: SourceEntry) -> None:
    if found != wanted:
        raise LoadmasterError(
            f"tensor {name!r} is {found.dtype} of shape {list(found.shape)} in the store, and {wanted.dtype} of shape "
            f"{list(wanted.shape)} was wanted"
        )

"""Where the simulations of a search run: processes of this machine, or a Ray or Dask cluster behind the same joblib call.

An executor is written `local`, `ray`, `dask`, or with a cluster's address `ray:ADDRESS` or `dask:ADDRESS`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from deepinfer.errors import UsageError

LOCAL = "local"


def connected(executor: str) -> AbstractContextManager[None]:
    """While it lasts, joblib's calls run on the executor; what it started is stopped at its end.

    Without an address a cluster that this process is connected to is used, else one is started on this machine. Ray
    also finds one that runs on this machine. Raises UsageError for an unknown executor, one whose package is not
    installed, and an address where no cluster answers.
    """
    name, _, address = executor.partition(":")
    if name == LOCAL and not address:
        return contextlib.nullcontext()
    if name not in _CONNECT:
        raise UsageError(f"unknown executor {executor!r}: known are {LOCAL}, ray[:ADDRESS], dask[:ADDRESS]")
    return _on_cluster(name, address)


@contextlib.contextmanager
def _on_cluster(name: str, address: str) -> Iterator[None]:
    from joblib import parallel_config

    with _CONNECT[name](address), parallel_config(backend=name):
        yield


@contextlib.contextmanager
def _ray(address: str) -> Iterator[None]:
    ray = _package("ray", "ray")
    register = _package("ray.util.joblib", "ray").register_ray
    started = not ray.is_initialized()
    if started:
        with _reaching("ray", address):
            ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
    register()
    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextlib.contextmanager
def _dask(address: str) -> Iterator[None]:
    distributed = _package("distributed", "dask")
    if not address:
        with contextlib.suppress(ValueError):  # nobody has connected yet
            distributed.get_client()
            yield
            return
    with _reaching("dask", address):
        client = distributed.Client(address or None, **({} if address else {"dashboard_address": None}))
    with client:
        yield


_CONNECT: dict[str, Callable[[str], AbstractContextManager[None]]] = {"ray": _ray, "dask": _dask}


def _package(module: str, extra: str) -> Any:
    """A module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"--executor {extra} needs the {extra} extra, which is not installed: pip install '.[{extra}]' from this "
            "project's folder"
        ) from None


@contextlib.contextmanager
def _reaching(name: str, address: str) -> Iterator[None]:
    """Whatever a cluster's library raises on the way to an address, as one sentence."""
    try:
        yield
    except (OSError, ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no {name} cluster answers at {address or 'this machine'}: {reason}") from None

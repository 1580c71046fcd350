"""Where the simulations of a search run: processes of this machine, Ray or Dask, all behind the same joblib call.

An executor is written `local`, `ray`, `dask`, or with a cluster's address `ray:ADDRESS` or `dask:ADDRESS`.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

from deepinfer.errors import UsageError
from deepinfer.registry import load_backend

LOCAL = "local"
KNOCK_S = 5.0
"""How long a cluster's address may take to answer."""


Work = Iterable[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
"""Calls made by `joblib.delayed`."""
Run = Callable[[Work], Iterable[Any]]
"""Makes calls somewhere and returns their results, in the order of the calls wherever each one ran."""


@contextlib.contextmanager
def connected(executor: str, jobs: int) -> Iterator[Run]:
    """What runs calls on an executor, `jobs` at a time (-1: one per core of it); whatever it started ends with it.

    Without an address a cluster that this process is connected to is used, else one is started on this machine. Ray
    also finds one that runs on this machine. Raises UsageError for an unknown executor, one whose package is not
    installed, and an address where no cluster answers.
    """
    name, _, address = executor.partition(":")
    if name == LOCAL and not address:
        starting = _start_workers(jobs)

        def run(work: Work) -> Iterable[Any]:
            list(starting)  # they take work from then on
            with _interrupts_ignored():
                return cast("Iterable[Any]", _parallel(jobs, "generator")(work))

        try:
            yield run
        finally:
            # A search that ends before it has simulated anything does not wait for them; joblib warns of that.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                getattr(starting, "close", lambda: None)()
        return
    if name not in _CONNECT:
        raise UsageError(f"unknown executor {executor!r}: known are {LOCAL}, ray[:ADDRESS], dask[:ADDRESS]")
    from joblib import parallel_config

    with _CONNECT[name](address), parallel_config(backend=name):
        # Ray's backend has no generators: its results come a round at a time.
        yield lambda work: _parallel(jobs, "list" if name == "ray" else "generator")(work)


def _start_workers(jobs: int) -> Iterator[Any]:
    """Worker processes that import what they need while this one screens; what is returned ends when they are ready."""
    from joblib import delayed, effective_n_jobs

    count = effective_n_jobs(jobs)
    if count == 1:
        return iter(())
    with _interrupts_ignored():
        return cast("Iterator[Any]", _parallel(jobs, "generator")(delayed(_get_ready)() for _ in range(count)))


def _get_ready() -> None:
    importlib.import_module("planner.refine")
    load_backend("sim")


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT for a moment: worker processes started now inherit that Ctrl-C is for this one to handle.

    Outside the main thread, where signals are not handled, do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _parallel(jobs: int, return_as: str) -> Any:
    from joblib import Parallel  # heavy to import: only a search needs it

    return Parallel(n_jobs=jobs, return_as=return_as, pre_dispatch="all")


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
    if not address and _has_client(distributed):
        yield
        return
    with _reaching("dask", address):
        client = distributed.Client(address or None, **({} if address else {"dashboard_address": None}))
    with client:
        yield


def _has_client(distributed: Any) -> bool:
    """Whether this process is connected to a Dask cluster."""
    try:
        distributed.get_client()
    except ValueError:
        return False
    return True


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
    """Whatever is raised on the way to an address, as one sentence."""
    try:
        _knock(address)
        yield
    except (OSError, ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no {name} cluster answers at {address or 'this machine'}: {reason}") from None


def _knock(address: str) -> None:
    """Raise OSError where nobody listens: Ray would try for minutes, and Dask for half of one."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()

"""Finds backends by name among the installed entry points of group `deepinfer.backends`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import cast

from deepinfer.engine.backend import Backend
from deepinfer.errors import unknown_name

_GROUP = "deepinfer.backends"


def backend_names() -> list[str]:
    """Names of the installed backends; none is imported."""
    return sorted(point.name for point in entry_points(group=_GROUP))


def load_backend(name: str) -> Backend:
    """An instance of the backend called `name`. Raises UsageError for an unknown one."""
    for point in entry_points(group=_GROUP):
        if point.name == name:
            return cast("Backend", point.load()())
    raise unknown_name("backend", name, backend_names())

"""The `cpu` backend: plain torch on this host, the numerical reference of every operator; gloo between ranks."""

from __future__ import annotations

from backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

"""The simulator: the engine's own scheduler and graph, with SimPy letting the modelled time pass."""

from backends.sim.backend import SimBackend

__all__ = ["SimBackend"]

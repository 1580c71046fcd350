"""Settings of all tests."""

import os

# Before NumPy or torch are imported: tests run in as many processes as there are cores, ranks in several each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Machines that run the tests are shared: how long an example takes says nothing about the code.
settings.register_profile("deepinfer", deadline=None)
settings.load_profile("deepinfer")

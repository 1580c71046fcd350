"""Settings of all tests."""

from hypothesis import settings

# Machines that run the tests are shared: how long an example takes says nothing about the code.
settings.register_profile("deepinfer", deadline=None)
settings.load_profile("deepinfer")

"""Settings of all tests."""

import os

from hypothesis import settings

# Two shared cores: how long an example takes says nothing about the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
# Torch's threads of several processes would wait for each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

"""Settings for all tests: a machine that is busy with something else must not fail a property test, and
Triton's kernels are interpreted where they are not asked to be compiled."""

from hypothesis import HealthCheck, settings

import tests.harness.triton_interpreter  # noqa: F401 - before anything imports triton

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

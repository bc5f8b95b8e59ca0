"""Settings for all tests: a machine that is busy with something else must not fail a property test, nor a shell
that starts the suite in the background one that sends Ctrl-C.
"""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""Settings for all tests: neither a machine that is busy with something else, nor a shell that starts them in
the background, may fail one; and Triton's kernels are interpreted where they are not asked to be compiled.
"""

import signal

from hypothesis import HealthCheck, settings

import tests.harness.triton_interpreter  # noqa: F401 - before anything imports triton

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # so a shell, and nohup, start what runs in the background
        signal.signal(number, usual)

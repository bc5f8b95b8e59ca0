"""`python -m hybridserve` and the script `hybridserve`: the command line, quiet under Ctrl-C from the start.

Imports nothing of weight by itself, for what is imported here no handler guards.
"""

import sys


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from hybridserve.interrupt import INTERRUPTED, interrupt_exits_at_once
    except (KeyboardInterrupt, RuntimeError):  # what Python 3.11 makes of one that hits the body of an enum
        sys.exit(130)
    try:
        with interrupt_exits_at_once():
            from hybridserve.cli import main as run_command
        run_command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

"""`python -m hybridserve` is the command line."""

import sys

try:
    from hybridserve.cli import main
except KeyboardInterrupt:
    sys.exit(130)  # as main() does later on

if __name__ == "__main__":
    main()

"""`python -m hybridserve` is the command line."""

from hybridserve.cli import main

if __name__ == "__main__":
    main()

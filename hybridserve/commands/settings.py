"""`hybridserve config`: whether a file can be used, and what every setting is and where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.cli_options import typed_options
from hybridserve.config.advice import worth_knowing
from hybridserve.config.effective import as_yaml
from hybridserve.config.loader import read_config

if TYPE_CHECKING:
    import argparse

    from hybridserve.config.schema import ServerConfig


def run(args: argparse.Namespace) -> None:
    """ConfigError with a line for each problem of the file."""
    configuration = read_config(file=args.file, overrides=typed_options(args), with_keys=False)
    if args.action == "show":
        print(as_yaml(configuration, with_defaults=args.effective), end="")
        return
    print(f"{args.file}: ok")
    for line in worth_knowing(configuration):
        print(line)
    if refused := _why_not_served(configuration.config.server):
        print(f"{args.file}: {refused}")


def _why_not_served(config: ServerConfig) -> str | None:
    """Of a file that all but `serve` can use."""
    from hybridserve.server.security import check_exposure

    try:
        check_exposure(config)
    except ValueError as error:
        return f"`serve` refuses it as it is: {error}"
    return None

"""What goes wrong between ranks. Imports no torch: a command line catches these."""

from __future__ import annotations


class RankFailure(RuntimeError):
    """A rank died, hangs or disagrees, so no step can be computed any more. The message names the rank and
    what is known of the cause."""


class RankDisagreement(RuntimeError):
    """This rank was told something that contradicts what it was told before."""


class PeerLost(RuntimeError):
    """An exchange with other ranks broke off: the cause is elsewhere, and whoever has it says so."""

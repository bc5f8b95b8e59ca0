"""An engine in a process of its own, and the asyncio client that drives it. The client imports no torch."""

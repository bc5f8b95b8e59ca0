"""Low-rank adapters: reserved for the package that loads, stores and applies them; it holds no code yet."""

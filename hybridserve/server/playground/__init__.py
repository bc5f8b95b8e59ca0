"""The page at `/`: chat with the model and its adapters, and watch the engine.

`files` serves what is in `static`, as it is: there is no build step. `state` is what the page shows of the
engine.
"""

"""OpenAI-compatible HTTP over an `AsyncLLM`. Knows requests, keys and limits; imports no torch and nothing of
the engine's inside."""

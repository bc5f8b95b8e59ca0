"""Descriptions of texts (`core.structured_outputs`) made into what says which tokens may come next."""

"""A suggestion is one only where the name is near."""

from __future__ import annotations

import pytest

from hybridserve.config.spelling import nearest

KNOWN = ["model", "seed", "moe", "dtype", "prompts", "cache.block_size", "kernels.moe", "kernels.attention"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modle", "model"),
        ("Model", "model"),
        ("prompt", "prompts"),
        ("cache.blok_size", "cache.block_size"),
        ("cache.block-size", "cache.block_size"),
        ("kernel.atention", "kernels.attention"),
        ("seed", "seed"),
    ],
)
def test_near(name, meant):
    assert nearest(name, KNOWN) == meant


@pytest.mark.parametrize(
    "name",
    [
        "mode_l.x",
        "prompt_file",
        "server",
        "parallel",
        "kernels.rope",
        "quant.block_size",
        "block_size",
        "",
    ],
)
def test_not_near(name):
    assert nearest(name, KNOWN) is None


def test_nothing_is_known():
    assert nearest("x", []) is None

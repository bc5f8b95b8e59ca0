"""Tests of what a machine may lack are skipped there, or fail where the environment asks for it."""

from __future__ import annotations

import pytest

from tests.harness.required import VARIABLE, need


def test_what_is_missing_is_skipped_or_fails(monkeypatch):
    need(True, "no node")
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no node"):
        need(False, "no node")
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(pytest.fail.Exception, match=f"no node, and {VARIABLE} is 1"):
        need(False, "no node")
    need(True, "no node")

"""What Prometheus' own parser makes of /metrics of the real server, and whether the documentation says so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybridserve.core.prefix_misses import Miss
from hybridserve.core.prefix_nodes import Cause
from hybridserve.server.security import ROUTES
from tests.harness.serve_process import ROOT

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tests.harness.serve_process import Server

pytestmark = pytest.mark.slow

PREFIX = "hybridserve_"
LABELS = {
    "path": {*ROUTES, "(other)"},
    "status": {"200", "400", "404", "503"},
    "finished_reason": {"stop", "length", "abort", "error", "refused"},
    "phase": {"schedule", "build", "forward", "sample", "update", "import", "tokenizer", "plan", "load"},
    "adapter": {"bard", "kjv", "(base)", "(others)"},
    "field": {"user"},
    "reason": {"queue_full"},
    "cause": {*map(str, Cause), "blocks", *map(str, Miss)},
    "kind": {
        "kv",
        "state",
        "free",
        "kv_live",
        "state_live",
        "kv_cached",
        "checkpoints",
        "fragmented",
        "sequences",
        "prefix_blocks",
    },
    "unit": {"blocks", "checkpoints"},
}
"""All values that these labels may have after what the tests do."""


def scrape(served: Server) -> dict[str, Metric]:
    page = served.get("/metrics")[1].decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


@pytest.fixture(scope="module")
def used(served: Server) -> Server:
    """After requests of each sort, and names that nobody knows."""
    for fields in (
        {"n": 3, "max_tokens": 5},
        {"model": "bard", "user": "me"},
        {"model": "kjv", "stream": True},
        {"temperature": -1},
    ):
        served.request("POST", "/v1/completions", {"prompt": "for the", **fields}).read()
    for index in range(30):
        served.get(f"/nowhere/{index}")
        served.request("POST", "/v1/completions", {"prompt": "a", "model": f"name{index}"}).read()
    served.wait_idle()
    return served


def test_names_and_types(used: Server) -> None:
    families = scrape(used)
    assert all(name.startswith(PREFIX) for name in families)
    for family in families.values():
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        if family.type == "counter":
            assert {sample.name for sample in family.samples} <= {f"{family.name}_total"}
        names = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(set(names)) == len(names), "a series twice"


def test_labels_have_bounds(used: Server) -> None:
    families = scrape(used)
    samples = [sample for family in families.values() for sample in family.samples]
    assert len(samples) < 500
    for sample in samples:
        for label, value in sample.labels.items():
            assert value in LABELS.get(label, {value}), sample
    values = {(label, value) for sample in samples for label, value in sample.labels.items()}
    assert not [value for _, value in values if value.startswith("name")]


def test_histograms_add_up(used: Server) -> None:
    for family in scrape(used).values():
        if family.type != "histogram":
            continue
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert counts[-1] == count


def test_counters_only_rise(used: Server) -> None:
    def totals() -> dict[tuple[str, str], float]:
        return {
            (sample.name, str(sample.labels)): sample.value
            for family in scrape(used).values()
            for sample in family.samples
            if family.type == "counter"
        }

    before = totals()
    used.request("POST", "/v1/completions", {"prompt": "for the", "max_tokens": 3, "model": "bard"}).read()
    after = totals()
    assert before.keys() <= after.keys()
    assert all(after[name] >= value for name, value in before.items())
    name = (f"{PREFIX}generation_tokens_total", "{}")
    assert after[name] == before[name] + 3


def test_the_documentation_names_every_metric(used: Server) -> None:
    section = (ROOT / "docs" / "server.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    told = {re.sub(r"\{.*\}", "", name) for name in re.findall(r"`([a-z0-9_{},]+)`", section)}
    told.discard(PREFIX)
    shown = {family.name.removeprefix(PREFIX) for family in scrape(used).values()}
    assert {re.sub(r"_total$", "", name) for name in told} == shown

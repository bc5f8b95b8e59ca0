"""docs/grafana.json and docs/server.md name what a real server's /metrics has, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.serve_process import server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
MACROS = {"$__rate_interval": "5m", "$instance": ".*"}
"""What Grafana puts in."""


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def filled(expression: str) -> str:
    for name, value in MACROS.items():
        expression = expression.replace(name, value)
    return expression


def selectors(node: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """(metric, its matchers) of each selector in a parsed expression."""
    import promql_parser

    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, {matcher.name: matcher.value for matcher in node.matchers.matchers}
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str | float | int):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Families of /metrics by name, of a server that has done a bit of everything."""
    file = tmp_path_factory.mktemp("metrics") / "serve.yaml"
    file.write_text("model: demo\nserver: {max_queue: 0}\nscheduler: {max_num_seqs: 4}\n")
    with server(file=file) as one:
        ask = {"prompt": "for the", "max_tokens": 4}
        structured = {"structured_outputs": {"regex": "[ab]{3}"}}
        for more in ({}, {"model": "shakespeare"}, structured, structured, {"user": "me"}):
            assert one.post("/v1/completions", {**ask, **more})[0] == 200
        assert one.post("/v1/completions", {**ask, "wrong": 1})[0] == 400
        page = one.get("/metrics")[1].decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def samples(scraped: dict[str, Any]) -> dict[str, set[str]]:
    """Names as they are queried -> their labels."""
    found: dict[str, set[str]] = {}
    for family in scraped.values():
        if family.type == "counter":  # one whose labels have not been seen yet has no sample
            found.setdefault(f"{family.name}_total", set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_parses(expression):
    parser = pytest.importorskip("promql_parser")
    parser.parse(filled(expression))


def test_an_expression_that_is_none_does_not_parse():
    parser = pytest.importorskip("promql_parser")
    with pytest.raises(ValueError, match=r"."):
        parser.parse(filled(expressions()[0] + ")"))


def test_every_metric_of_the_dashboard_is_in_a_real_scrape(scraped):
    parser = pytest.importorskip("promql_parser")
    known = samples(scraped)
    named = set()
    for expression in expressions():
        found = list(selectors(parser.parse(filled(expression))))
        assert found, expression
        for name, matchers in found:
            named.add(name)
            assert name in known, f"{name} in {expression}"
            assert matchers.keys() - {"instance"} <= (known[name] | {"path"}), expression
        for labels in re.findall(r"by \(([\w, ]+)\)", expression):
            (name, _), *_ = found
            if known[name]:
                assert set(labels.split(", ")) <= known[name], expression
    assert len(named) > 40


def test_the_dashboard_can_be_imported():
    """What Grafana's import needs, and a data source that its user chooses."""
    assert DASHBOARD["uid"] == "hybridserve"
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "hybridserve_engine_up" in variables["instance"]["query"]["query"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not places & cells, panel["title"]
        places |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def documented() -> set[str]:
    """Names in the table of docs/server.md."""
    section = (ROOT / "docs" / "server.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    return set(re.findall(r"`([a-z][a-z0-9_]+)(?:\{[\w,]+\})?`", section)) - {"hybridserve_"}


def test_the_documented_metrics_are_those_that_there_are(scraped):
    queried = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in scraped.values()
    }
    actual = {name.removeprefix("hybridserve_") for name in queried}
    actual = {f"{name}_info" if name == "cache_config" else name for name in actual}
    assert documented() == actual


def test_labels_have_few_values(scraped):
    for family in scraped.values():
        assert family.name.startswith("hybridserve_")
        for label in {label for sample in family.samples for label in sample.labels} - {"le"}:
            assert len({sample.labels.get(label) for sample in family.samples}) <= 70, (family.name, label)


def test_what_the_engine_counts_arrives(scraped):
    def value(name: str) -> float:
        return next(
            sample.value for family in scraped.values() for sample in family.samples if sample.name == name
        )

    assert value("hybridserve_grammar_compiles_total") == 1
    assert value("hybridserve_grammar_cache_hits_total") == 1
    assert value("hybridserve_grammar_compile_seconds_total") > 0
    assert value("hybridserve_grammars_cached") == 1
    assert value("hybridserve_ready") == 1
    assert value("hybridserve_server_sequences") == 0
    assert value("hybridserve_server_sequences_max") == 4
    assert value("hybridserve_nonfinite_logits_total") == 0
    phases = {sample.labels["phase"] for sample in scraped["hybridserve_startup_seconds"].samples}
    assert phases >= {"import", "plan", "load", "tokenizer"}

"""Latencies and rates out of hand-made times, against numpy and by hand."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.bench.record import Record, apportion
from hybridserve.bench.report import Context, Report
from hybridserve.bench.slo import Slo
from hybridserve.bench.summary import Distribution, Summary, percentile, token_times
from hybridserve.bench.target import Arrival, RequestFailed, Usage

NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def record(*arrivals: tuple[float, int | None], start: float = 0.0, num_output: int | None = None, **fields):
    """Arrivals of (time, tokens)."""
    made = Record(start, start, **fields)
    for time, count in arrivals:
        made.add(time, Arrival("x", 1, count))
    total = sum(count or 0 for _, count in arrivals) if num_output is None else num_output
    made.usage = Usage(10, total)
    made.end = arrivals[-1][0] if arrivals else start
    return made


@given(NUMBERS, st.floats(0, 100))
def test_percentile_is_numpys(values, percent):
    expected = np.percentile(np.array(values), percent)
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(NUMBERS)
def test_distribution_is_numpys(values):
    found = Distribution.of(values)
    array = np.array(values)
    assert found.weight == len(values)
    assert found.mean == pytest.approx(array.mean(), rel=1e-9, abs=1e-9)
    assert (found.p50, found.p90, found.p99) == pytest.approx(np.percentile(array, [50, 90, 99]), rel=1e-9)
    assert found.max == array.max()


def test_nothing_has_no_distribution():
    assert Distribution.of([]) is None


def test_latencies_of_one_token_an_arrival():
    made = record((1.0, 1), (1.5, 1), (1.7, 1), start=0.25)
    assert made.ttft == 0.75
    assert made.e2e == pytest.approx(1.45)
    assert made.gaps() == pytest.approx([0.5, 0.2])
    assert list(token_times([made])) == pytest.approx([0.5, 0.2])
    assert made.mean_itl == pytest.approx(0.35)


def test_tokens_of_one_arrival_share_the_time_before_it():
    """Three tokens that come together after 0.3 s were no 0.3, 0 and 0, nor is it one token of 0.3."""
    made = record((1.0, 1), (1.3, 3), (1.4, 1))
    assert list(token_times([made])) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert made.gaps() == pytest.approx([0.3, 0.1])
    assert made.mean_itl == pytest.approx((1.4 - 1.0) / 4)


def test_tokens_of_the_first_arrival_have_no_time_between_them():
    made = record((1.0, 5), (2.0, 1))
    assert list(token_times([made])) == [1.0]


def test_an_arrival_without_a_whole_token_lengthens_the_next():
    """Text that was held back for a stop string comes without a token of its own."""
    made = record((1.0, 1), (1.2, 0), (1.3, 1))
    assert list(token_times([made])) == pytest.approx([0.3])
    assert len(made.gaps()) == 2


def test_untold_counts_are_the_usage_over_the_events():
    made = record((1.0, None), (1.2, None), (1.4, None), num_output=9)
    assert not made.is_exact
    assert made.counts() == [3, 3, 3]
    assert made.mean_itl == pytest.approx(0.4 / 6)
    assert Summary.of([made], 1.0).num_estimated == 1


@given(st.integers(0, 500), st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_apportioned_counts_add_up(total, weights):
    found = apportion(total, weights)
    assert sum(found) == total
    assert min(found) >= 0
    exact = [total * weight / sum(weights) for weight in weights]
    assert all(abs(count - share) <= 1 for count, share in zip(found, exact, strict=True))


def test_throughput_counts_successes_by_usage():
    ok = record((1.0, 1), (2.0, 1), num_output=7)  # the usage is right, whatever the arrivals held
    failed = record((1.0, 1))
    failed.error = RequestFailed("HTTP 429", "the queue is full")
    summary = Summary.of([ok, failed, failed], 4.0)
    assert (summary.num_ok, summary.num_failed) == (1, 2)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (10, 7)
    assert summary.requests_per_second == 0.25
    assert summary.output_tokens_per_second == 1.75
    assert summary.errors == {"HTTP 429": 2}
    assert summary.error_examples == {"HTTP 429": "the queue is full"}
    assert summary.ttft.weight == 1


def test_goodput():
    slow_start = record((3.0, 1), (3.01, 1))
    slow_tokens = record((0.1, 1), (0.4, 1))
    good = record((0.1, 1), (0.11, 1))
    one_token = record((0.1, 1))
    failed = record((0.1, 1))
    failed.error = RequestFailed("timeout", "")
    slo = Slo.parse("ttft=500ms, itl=50ms")
    goodput = Summary.of([slow_start, slow_tokens, good, one_token, failed], 2.0, slo).goodput
    assert (goodput.num_requests, goodput.share, goodput.requests_per_second) == (2, 0.4, 1.0)


def test_slo_bounds_e2e_too_and_includes_its_bound():
    slo = Slo.parse("e2e=.5s")
    assert slo.is_met_by(record((0.5, 1)))
    assert not slo.is_met_by(record((0.5001, 1)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttf=5ms", "'ttf' is unknown; did you mean ttft?"),
        ("speed=5ms", "'speed' is unknown; there is ttft, itl, e2e"),
        ("ttft=5", "ttft: '5' is no time such as 500ms or 2s"),
        ("ttft=-5ms", "ttft: '-5ms' is no time"),
        ("ttft", "ttft: '' is no time"),
        ("ttft=1s,ttft=2s", "ttft is given twice"),
        ("", "'' is unknown"),
    ],
)
def test_bad_slo(text, complaint):
    with pytest.raises(ValueError, match=f"^--slo: .*{re.escape(complaint)}"):
        Slo.parse(text)


def context(**changes):
    fields = {
        "target": {"model": "m"},
        "counts": "told",
        "workload": "W2",
        "form": "ids",
        "seed": 0,
        "num_turns": 1,
        "load": {"kind": "closed", "concurrency": 2},
        "load_text": "2 at a time",
        "num_warmup": 1,
        "begin_time": "2026-01-01T00:00:00+00:00",
    }
    return Context(**{**fields, **changes})


def test_report_separates_adapters():
    records = [record((1.0, 1), (1.1, 1)), *(record((2.0, 1), (2.5, 1), adapter="a") for _ in range(3))]
    report = Report(context(), records, Slo.parse("ttft=1s"))
    found = report.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {name: part["num_ok"] for name, part in found["adapters"].items()} == {"base": 1, "a": 3}
    assert found["summary"]["num_output_tokens"] == 8
    assert found["summary"]["seconds"] == 2.5
    assert found["adapters"]["a"]["output_tokens_per_second"] == 6 / 2.5
    assert [each["adapter"] for each in found["requests"]] == [None, "a", "a", "a"]
    text = report.text()
    assert "base" in text
    assert "goodput" in text


def test_report_says_when_the_client_was_too_slow():
    late = record((1.0, 1))
    late.due = -0.5
    assert "too slow for the load" in Report(context(), [late]).text()
    assert "too slow" not in Report(context(), [record((1.0, 1))]).text()


def test_report_of_failures_alone():
    failed = Record(0.0, 0.0, error=RequestFailed("timeout", "no whole answer in 3 s"), end=3.0)
    text = Report(context(num_skipped=2), [failed]).text()
    assert "1  timeout: no whole answer in 3 s" in text
    assert "2 later turns not sent" in text


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from hybridserve.bench.plot import check_plot, draw

    rng = random.Random(0)
    records = []
    for number in range(40):
        times = np.cumsum([rng.uniform(0.01, 0.5) for _ in range(9)]) + number * 0.1
        records.append(record(*((float(time), 1) for time in times), start=number * 0.1))
    records.append(Record(1.0, 1.0, error=RequestFailed("timeout", ""), end=3.0))
    path = tmp_path / "run.png"
    check_plot(path)
    for drawn in (records, records[:1], records[-1:], [record((1.0, 1))]):
        draw(Report(context(), drawn, Slo.parse("ttft=1s")), path)
        assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="its ending must be one of"):
        check_plot(tmp_path / "run.doc")

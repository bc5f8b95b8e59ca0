"""A run's results as tables for people. Knows the records of the parts; measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Record = dict[str, Any]


def markdown(report: Record) -> str:
    """Of a report as `__main__` writes it; parts that are missing are left out."""
    parts = {part["part"]: part for part in report["parts"]}
    lines = [f"# GPU run of {report['date']}, commit {report['commit'] or 'unknown'}", ""]
    if report["dry"]:
        lines += ["**A dry run on a CPU, with tiny shapes: no time in it means anything.**", ""]
    lines += table(
        ("part", "outcome", "seconds", "of"),
        [(name, part["outcome"], part["seconds"], part["limit"]) for name, part in parts.items()],
    )
    records = {name: part["records"] for name, part in parts.items()}
    lines += environment(records.get("environment", []))
    lines += tests(records.get("tests", []))
    lines += kernels(records.get("kernels", []))
    engines = {name: records.get(name, []) for name in ("engine-bf16", "engine-int8", "transformers")}
    lines += decoding(engines)
    lines += prefilling(engines)
    lines += adapters(engines["engine-bf16"])
    for name, part in parts.items():
        lines += failures(name, part)
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Nothing where there are no rows."""
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell(each) for each in line) + " |" for line in lines] + [""]


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def environment(records: Sequence[Record]) -> list[str]:
    rows = []
    for record in records:
        for key, value in record.items():
            if key == "kind":
                continue
            if isinstance(value, dict):
                value = ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
            rows.append((f"{record['kind']}: {key}", value))
    return ["## Environment", "", *table(("", ""), rows)] if rows else []


def tests(records: Sequence[Record]) -> list[str]:
    found = of_kind(records, "test")
    collected = sum(record["num_tests"] for record in of_kind(records, "collected"))
    if not collected and not found:
        return []
    counts = {
        name: sum(test["outcome"] == name for test in found) for name in ("passed", "failed", "skipped")
    }
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    lines = ["## Tests", "", f"{collected} tests: {said}, {collected - len(found)} not reached.", ""]
    rows = [(test["name"], test["message"].splitlines()[-1]) for test in found if test["outcome"] == "failed"]
    return lines + table(("failed", "because"), rows)


def kernels(records: Sequence[Record]) -> list[str]:
    lines = []
    for rates in of_kind(records, "rates"):
        if "memory" in rates:
            lines += ["## Measured limits", "", *table(("limit", ""), list(limits(rates)))]
    rows = []
    for record in of_kind(records, "kernel"):
        if "us" in record:
            share = record["floor_us"] / record["us"]
            bandwidth = record["num_bytes"] / record["us"] / 1e6
            rows.append(
                (record["shape"], record["name"], record["us"], record["floor_us"], f"{share:.0%}",
                 bandwidth, record["num_ops"] / record["us"] / 1e6, record["eager_us"])
            )  # fmt: skip
    head = ("model", "kernel", "us", "floor", "of it", "TB/s", "Tops/s", "us with the host")
    if rows:
        lines += [
            "## Kernels",
            "",
            "In a graph, with a cold cache; the floor is that of bytes or operations.",
        ]
        lines += ["", *table(head, rows)]
    return lines


def limits(rates: Record) -> Iterator[tuple[str, str]]:
    yield "memory, read and written", f"{rates['memory'] / 1e12:.2f} TB/s"
    yield "memory, read", f"{rates['read'] / 1e12:.2f} TB/s"
    yield "a graph of one small kernel", f"{rates['launch'] * 1e6:.1f} us"
    for name in ("float32", "bfloat16", "float16", "int8"):
        yield f"{name} products", f"{rates[name] / 1e12:,.0f} T operations/s"


def decoding(engines: dict[str, Sequence[Record]]) -> list[str]:
    peers = {
        record["batch"]: record["tokens_per_second"]
        for record in of_kind(engines["transformers"], "decode")
        if record.get("tokens_per_second")
    }
    rows = []
    for name in ("engine-bf16", "engine-int8"):
        for record in of_kind(engines[name], "decode"):
            if record.get("tokens_per_second"):
                rate, share = record["tokens_per_second"], record.get("roofline_share")
                peer = peers.get(record["batch"])
                rows.append(
                    (name, record["batch"], record["graphs"], rate, record["step_ms"],
                     None if share is None else f"{share:.0%}", peer, peer and f"{rate / peer:.1f}x")
                )  # fmt: skip
    head = ("", "sequences", "graphs", "tokens/s", "ms a step", "of the roofline", "transformers", "ratio")
    return ["## Decode", "", *table(head, rows)] if rows else []


def prefilling(engines: dict[str, Sequence[Record]]) -> list[str]:
    rows = [
        (name, record["tokens"], record.get("graphs"), record["tokens_per_second"], record["ttft_ms"])
        for name, records in engines.items()
        for record in of_kind(records, "prefill")
        if "ttft_ms" in record
    ]
    head = ("", "tokens of the prompt", "graphs", "tokens/s", "ms to the first token")
    return ["## Prefill, one prompt", "", *table(head, rows)] if rows else []


def adapters(records: Sequence[Record]) -> list[str]:
    rows = [
        (record["batch"], record["base"], record["mixed"], f"{record['share']:.0%}")
        for record in of_kind(records, "adapters")
        if "share" in record
    ]
    head = ("sequences", "base model, tokens/s", "8 adapters", "of it")
    return ["## Adapters", "", *table(head, rows)] if rows else []


def failures(name: str, part: Record) -> list[str]:
    """What went wrong in a part, and what was left out."""
    rows = []
    for record in part["records"]:
        reason = record.get("error") or record.get("skipped")
        if reason and record["kind"] != "test":
            facts = [str(record[key]) for key in ("name", "batch", "tokens") if key in record]
            rows.append(
                (" ".join([record["kind"], *facts]), "failed" if "error" in record else "left out", reason)
            )
    lines = table(("piece", "", "because"), rows)
    if part.get("tail"):
        lines += ["```", *part["tail"], "```", ""]
    return [f"## What {name} did not do", "", *lines] if lines else []

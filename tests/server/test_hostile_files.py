"""Models and adapters that somebody has tampered with, given to the real server: code beside the weights,
pickles in their place, and headers of safetensors that lie."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.harness.processes import wait_until
from tests.harness.serve_process import ROOT, Server, server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

DEMO = ROOT / "hybridserve" / "models" / "demo"
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
EVIL = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model, to be spoiled."""
    path = tmp_path / "model"
    shutil.copytree(DEMO, path, ignore=shutil.ignore_patterns("adapters"))
    return path


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refused(model: Path) -> str:
    """The last line of a server that doesn't start, which is the only one that is about anything."""
    done = subprocess.run(
        [sys.executable, "-m", "hybridserve", "serve", str(model), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


# ---- models


def bring_code(model: Path, marker: Path) -> None:
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "conftest.py"):
        (model / name).write_text(EVIL.format(str(marker)))
    maps = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
        "AutoTokenizer": ["tokenization_evil.EvilTokenizer", None],
    }
    change(model / "config.json", auto_map=maps, trust_remote_code=True)
    change(
        model / "tokenizer_config.json",
        auto_map=maps,
        trust_remote_code=True,
        tokenizer_class="EvilTokenizer",
    )


def test_s006_code_beside_a_model_is_not_run(model: Path, tmp_path: Path) -> None:
    """It is served without, as if it weren't there."""
    marker = tmp_path / "marker"
    bring_code(model, marker)
    body = {"prompt": "for the", "temperature": 0, "max_tokens": 8}
    with server(file=model) as one:
        _, answer = one.post("/v1/completions", body)
    with server() as plain:
        _, expected = plain.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert not marker.exists()


def test_s006_a_model_that_is_only_code_is_refused(model: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bring_code(model, marker)
    change(model / "config.json", model_type="evil", architectures=["EvilModel"])
    assert "evil" in refused(model).lower()
    assert not marker.exists()


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: str, rest: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + rest


def first(header: dict[str, Any]) -> str:
    return next(name for name in header if name != "__metadata__")


def tampered(kind: str, data: bytes) -> bytes:
    """The bytes of a safetensors file, changed so that they lie."""
    header, rest = header_of(data)
    name = first(header)
    entry = header[name]
    match kind:
        case "huge header":
            return struct.pack("<Q", 2**62) + data[8:]
        case "header past the end":
            return struct.pack("<Q", len(data) * 2) + data[8:]
        case "past the end":
            entry["data_offsets"] = [len(rest), len(rest) * 4]
            entry["shape"] = [3 * len(rest) // 2]
        case "overlap":
            other = next(each for each in header if each not in (name, "__metadata__"))
            entry["data_offsets"] = header[other]["data_offsets"]
        case "negative":
            entry["data_offsets"] = [-8, entry["data_offsets"][1]]
        case "shape":
            entry["shape"] = [2**40, 2**40]
        case "type":
            entry["dtype"] = "F64"
        case "name twice":
            text = json.dumps(header)
            return with_header(text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}", rest)
        case "cut short":
            return data[: len(data) // 2]
        case "not json":
            return with_header("{" * 1000, rest)
    return with_header(json.dumps(header), rest)


KINDS = ("huge header", "header past the end", "past the end", "overlap", "negative", "shape", "type")
KINDS += ("name twice", "cut short", "not json")


@pytest.mark.parametrize("kind", KINDS)
def test_s027_a_model_whose_header_lies(kind: str, model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(tampered(kind, data))
    assert WEIGHTS in refused(model)


def test_s027_a_header_that_is_only_written_anew_is_fine(model: Path) -> None:
    """The changes, not the writing, are what is refused."""
    header, rest = header_of((model / WEIGHTS).read_bytes())
    (model / WEIGHTS).write_bytes(with_header(json.dumps(header), rest))
    with server(file=model) as one:
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


# ---- adapters


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def served(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two adapters fit on the device."""
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    known = DEMO / "adapters"
    path.write_text(
        "model: demo\nmax_model_len: 512\n"
        f"lora: {{allow_runtime_loading: true, roots: [{root}], max_loaded: 2, "
        f"adapters: {{bard: {known / 'shakespeare'}, kjv: {known / 'scripture'}}}}}\n"
    )
    for name in ("shakespeare", "scripture", "python"):
        shutil.copytree(known / name, root / name)
    with server(file=path) as one:
        yield one
        one.wait_idle()


@pytest.fixture
def untouched(served: Server) -> Iterator[Server]:
    """Whatever is refused, the engine is the same one, and says what it said."""
    body = {"prompt": "And the", "model": "bard", "temperature": 0, "max_tokens": 16}
    before, pid = served.post("/v1/completions", body)[1]["choices"], served.engine_pid
    yield served
    assert served.post("/v1/completions", body)[1]["choices"] == before
    assert served.engine_pid == pid


def load(one: Server, path: str, name: str = "new") -> tuple[int, dict[str, Any]]:
    status, answer = one.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    return status, answer.get("error", answer)


def spoiled(root: Path, name: str, change: Callable[[Path], Any]) -> str:
    path = root / name
    shutil.copytree(root / "python", path)
    change(path)
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_s027_an_adapter_whose_header_lies(kind: str, root: Path, untouched: Server) -> None:
    def tamper(path: Path) -> None:
        (path / ADAPTER).write_bytes(tampered(kind, (path / ADAPTER).read_bytes()))

    status, error = load(untouched, spoiled(root, kind.replace(" ", "-"), tamper))
    assert (status, error["code"]) == (400, "bad_adapter")
    assert ADAPTER in error["message"]


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"])
def test_s004_an_adapter_that_is_a_pickle(name: str, root: Path, tmp_path: Path, untouched: Server) -> None:
    marker = tmp_path / "marker"
    program = f"cposix\nsystem\n(S'touch {marker}'\ntR."

    def disguise(path: Path) -> None:
        (path / ADAPTER).unlink()
        (path / name).write_bytes(program.encode())

    status, error = load(untouched, spoiled(root, name, disguise))
    assert (status, error["code"]) == (400, "bad_adapter")
    assert not marker.exists()

    def rename(path: Path) -> None:
        (path / ADAPTER).write_bytes(program.encode())

    status, error = load(untouched, spoiled(root, f"{name}-renamed", rename))
    assert (status, error["code"]) == (400, "bad_adapter")
    assert not marker.exists()


def test_s006_code_beside_an_adapter_is_not_run(root: Path, tmp_path: Path, untouched: Server) -> None:
    marker = tmp_path / "marker"

    def bring(path: Path) -> None:
        (path / "modeling_evil.py").write_text(EVIL.format(str(marker)))
        change(
            path / "adapter_config.json",
            auto_mapping={"parent_library": "modeling_evil", "base_model_class": "X"},
        )

    status, _ = load(untouched, spoiled(root, "with-code", bring))
    assert status in (200, 400)
    assert not marker.exists()


NOWHERE = (
    "../adapters/python",
    "/etc",
    "python/../../x",
    "python\x00",
    "\uff0e\uff0e/python",
    "x" * 10_000,
    "~",
    "",
)


@pytest.mark.parametrize("path", NOWHERE, ids=lambda path: ascii(path[:20]))
def test_s025_paths_that_lead_elsewhere(path: str, untouched: Server) -> None:
    status, _ = load(untouched, path)
    assert status == 400


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\x00", "\uff0e\uff0e", "x" * 65, "x" * 10_000, "", "a b", "\u202ea"]
)
def test_s025_names_that_are_none(name: str, untouched: Server) -> None:
    status, error = load(untouched, "python", name)
    assert (status, error["param"]) == (400, "lora_name")


def test_s025_a_link_that_leads_elsewhere(root: Path, tmp_path: Path, untouched: Server) -> None:
    shutil.copytree(root / "python", tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    assert load(untouched, "link")[0] == 400
    shutil.copytree(root / "python", root / "link-inside")
    (root / "link-inside" / ADAPTER).unlink()
    (root / "link-inside" / ADAPTER).symlink_to(tmp_path / "outside" / ADAPTER)
    status, _ = load(untouched, "link-inside")
    assert status == 400


# ---- adapters that come and go


def test_b038_s030_loads_beside_streams_change_nothing_for_them(root: Path, served: Server) -> None:
    """More adapters are asked for than fit, while two streams run whose own adapters have to stay theirs."""
    fields = {"prompt": "And the", "temperature": 0, "max_tokens": 300, "ignore_eos": True}

    def say(name: str) -> str:
        return served.post("/v1/completions", {**fields, "model": name})[1]["choices"][0]["text"]

    alone = {name: say(name) for name in ("bard", "kjv")}
    assert alone["bard"] != alone["kjv"]
    together: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda name=name: together.update({name: say(name)})) for name in alone
    ]
    for thread in threads:
        thread.start()
    others: list[threading.Thread] = []
    num_loads = 0
    while any(thread.is_alive() for thread in threads):
        for name, path in (("third", "python"), ("fourth", "shakespeare"), ("third", "scripture")):
            assert load(served, path, name)[0] == 200
            asked = {"prompt": "a", "model": name, "max_tokens": 1}
            others.append(threading.Thread(target=served.post, args=("/v1/completions", asked)))
            others[-1].start()
            num_loads += 1
        assert served.post("/v1/unload_lora_adapter", {"lora_name": "fourth"})[0] == 200
    for thread in [*threads, *others]:
        thread.join(60)
    assert together == alone
    assert num_loads >= 3
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "third"})[1]["still_in_use"] in (False, True)


def test_b039_after_many_continuations_an_adapter_goes(served: Server) -> None:
    assert load(served, "python", "gone")[0] == 200
    asked = {"prompt": "a", "model": "gone", "n": 16, "max_tokens": 4}
    assert served.post("/v1/completions", asked)[0] == 200
    status, answer = served.post("/v1/unload_lora_adapter", {"lora_name": "gone"})
    assert (status, answer["still_in_use"]) == (200, False)
    assert served.post("/v1/completions", asked)[0] == 404


def test_s012_schemas_of_all_sorts_leave_nothing_behind(served: Server) -> None:
    """What is kept of them has a bound: five hundred more cost no more memory than a few."""

    def memory() -> int:
        processes = [psutil.Process(pid) for pid in (served.process.pid, served.engine_pid)]
        children = psutil.Process(served.process.pid).children(recursive=True)
        return sum(process.memory_info().rss for process in {*processes, *children})

    def ask(index: int) -> None:
        schema = {"type": "object", "properties": {f"name{index}": {"enum": [index, f"x{index}" * 50]}}}
        body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}
        assert served.post("/v1/completions", body)[0] == 200

    for index in range(150):
        ask(index)
    before = memory()
    for index in range(150, 650):
        ask(index)
    assert memory() - before < 48 * 2**20
    assert wait_until(lambda: served.series()["hybridserve_num_requests_running"] == 0, 30)

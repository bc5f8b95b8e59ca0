"""No part of the program reads data that could be code, or fetches anything for a client.

A serializer that runs what it reads has been the hole of many a serving engine: in a broker between
processes, in a crash dump's reader, in a tool beside the server. So it is looked for everywhere.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FOLDERS = ("hybridserve", "kernels", "lora", "quant", "tools", "benchmarks", "examples")
SERIALIZERS = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
"""Modules that run what they read."""
MESSENGERS = {"zmq", "multiprocessing.connection", "multiprocessing.managers", "xmlrpc", "rpyc"}
"""Modules that use one of those between processes, or listen."""
READERS = {"recv_pyobj", "read_pickle", "from_pretrained_pickle", "load_module", "exec_module"}
FETCHERS = {"requests", "httpx", "httpx2", "aiohttp", "urllib3", "urllib.request", "http.client"}
"""Modules that open a URL."""


def files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert found
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(tree: ast.AST) -> Iterator[str]:
    """What is called, dotted as it is written, and names that imports bring by call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield name
            if name.endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
                yield f"import {node.args[0].value}"


def offences(source: str) -> set[str]:
    tree = ast.parse(source)
    bad = SERIALIZERS | MESSENGERS
    found = {name for name in imported(tree) if name in bad or name.partition(".")[0] in bad}
    for name in named(tree):
        last = name.rpartition(".")[2]
        if name in ("torch.load", "exec", "eval") or last in READERS:
            found.add(name)
        if name.startswith("import ") and name.removeprefix("import ") in bad:
            found.add(name)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_s002_nothing_is_unpickled(folder: str) -> None:
    bad = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in files(folder)}
    assert {path: found for path, found in bad.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "def f():\n    import dill",
        "import torch\ntorch.load(path)",
        "socket.recv_pyobj()",
        "from multiprocessing.connection import Listener",
        "import multiprocessing.connection",
        "importlib.import_module('pickle')",
        "eval(text)",
    ],
)
def test_s002_it_would_be_found(source: str) -> None:
    assert offences(source)


def test_s026_the_server_opens_no_url() -> None:
    """What an endpoint for traces sends is the library's own business, and there only if it was asked for."""
    for path in files(
        "hybridserve/server", "hybridserve/frontend", "hybridserve/engine", "hybridserve/grammar"
    ):
        used = {name for name in imported(ast.parse(path.read_text())) if name in FETCHERS}
        assert not used, path


def test_s006_no_model_brings_code() -> None:
    """Whatever asks a library for a tokenizer or a configuration may not let it import the model's files."""
    for path in files(*FOLDERS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path

"""The server that clients talk to: the demo model with two adapters, a template with tools, and no key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.serve_process import ROOT, Server, server
from tests.harness.tools import save_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

ADAPTERS = ROOT / "hybridserve" / "models" / "demo" / "adapters"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has to be as it was when its clients have gone: nothing runs, nothing holds memory."""
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), "plain")
    path.write_text(
        f"model: demo\ntokenizer: {tokenizer}\nmax_model_len: 2048\nscheduler: {{max_num_seqs: 16}}\n"
        f"lora: {{adapters: {{bard: {ADAPTERS / 'shakespeare'}, kjv: {ADAPTERS / 'scripture'}}}}}\n"
    )
    with server(file=path) as one:
        yield one
        one.wait_idle()


@pytest.fixture(scope="module")
def base_url(served: Server) -> str:
    """As clients of OpenAI's API want it."""
    return f"http://127.0.0.1:{served.port}/v1"

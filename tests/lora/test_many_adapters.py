"""A thousand adapters cost a request no more than a few do."""

from __future__ import annotations

import copy
import json
import re
import sys
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridserve.lora.loader import Loader, _Job
from hybridserve.lora.paths import CONFIG_FILE, WEIGHTS_FILE
from tests.harness.adapter_engine import AdapterEngine
from tests.harness.engine import Oracle, make_prompts

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from tests.harness.adapters import Kit

Q_PROJ = "base_model.model.model.layers.2.self_attn.q_proj"


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As many adapters of q_proj, of rank 1, each of its own content."""
    root = tmp_path_factory.mktemp("thousand")
    config = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1})
    paths = {}
    for number in range(1000):
        paths[f"n{number}"] = path = root / f"n{number}"
        path.mkdir()
        (path / CONFIG_FILE).write_text(config)
        generator = torch.Generator().manual_seed(number)
        tensors = {
            f"{Q_PROJ}.lora_A.weight": torch.randn(1, 32, generator=generator),
            f"{Q_PROJ}.lora_B.weight": torch.randn(32, 1, generator=generator),
        }
        save_file(tensors, path / WEIGHTS_FILE)
    return paths


def with_merged(kit: Kit, path: Path) -> Oracle:
    model = copy.deepcopy(kit.model)
    tensors = load_file(path / WEIGHTS_FILE)
    weight = model.get_submodule(Q_PROJ.removeprefix("base_model.model.")).weight
    with torch.no_grad():
        weight += tensors[f"{Q_PROJ}.lora_B.weight"] @ tensors[f"{Q_PROJ}.lora_A.weight"]
    return Oracle(model)


class Calls:
    """Counts the calls of this project's functions that decide and keep books, in this thread."""

    FILES = re.compile(r"hybridserve/(core/\w+|engine/(core|adapters)|lora/(store|loader))\.py$")

    def __init__(self) -> None:
        self.count = 0
        self._matches: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call":
            if file not in self._matches:
                self._matches[file] = bool(self.FILES.search(file.replace("/lora/", "/hybridserve/lora/")))
            self.count += self._matches[file]

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def at_once(self: Loader, work: Any, then: Any) -> None:
    """`Loader.submit`, without a thread: what happens is then the same every time."""
    self._pending.append(_Job(None, then, work()))


def test_a_thousand_adapters_cost_no_more_than_ten(
    kit: Kit, thousand: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for ten of them in four slots, where the host has room for six: counted, not timed."""
    monkeypatch.setattr(Loader, "submit", at_once)
    ten = list(thousand)[-10:]  # so that host memory begins with the same
    counts, texts = [], []
    for paths in ({name: thousand[name] for name in ten}, thousand):
        lora = {"max_loaded": 4, "host_bytes": 6 * 64 * 4, "adapters": {n: str(p) for n, p in paths.items()}}
        engine = AdapterEngine(kit, lora=lora, checksum=False, max_num_seqs=8)
        assert engine.core.gauges()["num_adapters"] == len(paths)
        assert engine.info(ten[0]).num_bytes == 64 * 4
        with Calls() as calls:
            for turn in range(40):
                engine.ask(f"r{turn}", make_prompts([6], turn, vocab_size=128)[0], ten[turn * 7 % 10], 3)
                if turn % 4 == 3:
                    engine.step()
            while engine.core.has_work:
                engine.step()
        engine.check_drained()
        counts.append(calls.count)
        texts.append([engine.results[f"r{turn}", 0].token_ids for turn in range(40)])
        stats = engine.core.gauges()
        assert stats["num_adapter_evictions"] >= 6
        assert stats["num_adapter_disk_reads"] > 0
        assert len(stats["adapters"]) == len(ten)
        engine.core.close()
    assert texts[0] == texts[1]
    for turn in (0, 13, 29):
        with_merged(kit, thousand[ten[turn * 7 % 10]]).check(engine.results[f"r{turn}", 0])
    assert counts[0] > 1000
    assert counts[1] == counts[0]

"""Adapters through the Python API, on the bundled demo model and its three adapters."""

from __future__ import annotations

import gc
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve import LLM, SamplingParams
from hybridserve.models.hub import bundled_adapters, resolve_model
from tests.harness.adapters import merged

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The people of the"
NAMES = ("python", "scripture", "shakespeare")
BUNDLED = bundled_adapters("demo")


def demo(**lora: Any) -> LLM:
    return LLM(
        "demo", memory_bytes="32MiB", check_integrity=True, dtype="float32", max_model_len=256, lora=lora
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    root = tmp_path_factory.mktemp("adapters")
    for name, path in BUNDLED.items():
        shutil.copytree(path, root / name)
    made = demo(allow_runtime_loading=True, roots=[root], max_loaded=2)
    made.root = root  # type: ignore[attr-defined]
    return made


def texts(llm: LLM, adapters: Any, prompt: str = PROMPT, params: SamplingParams = GREEDY) -> list[str]:
    prompts = [prompt] * len(adapters)
    return [output.outputs[0].text for output in llm.generate(prompts, params, adapter=adapters)]


def test_the_demo_brings_its_adapters(llm: LLM) -> None:
    assert [info.name for info in llm.list_adapters()] == list(NAMES)
    assert "adapters   python, scripture, shakespeare" in llm.plan.table()
    assert llm.plan.to_dict()["lora"]["adapters"]["python"].endswith("python")
    for info in llm.list_adapters():
        assert (info.rank, info.num_refs, len(info.report.applied)) == (16, 0, 29)


def test_an_adapter_for_each_prompt(llm: LLM) -> None:
    together = texts(llm, [None, *NAMES])
    assert len(set(together)) == 4
    for name, text in zip((None, *NAMES), together, strict=True):
        output = llm.generate(PROMPT, GREEDY, adapter=name)[0]
        assert (output.adapter, output.outputs[0].text) == (name, text)
    assert texts(llm, ["python"] * 2) == [together[1]] * 2
    assert "".join(llm.stream(PROMPT, GREEDY, adapter="scripture")) == together[2]
    (answer,) = llm.chat([{"role": "user", "content": "x"}], GREEDY, adapter="shakespeare")
    assert answer.adapter == "shakespeare"


def test_they_agree_with_transformers() -> None:
    """Each adapter of the demo, merged by peft: 12 greedy tokens in float32."""
    llm = demo()
    ids = llm.tokenizer.encode(PROMPT)
    for name, path in BUNDLED.items():
        model = merged(resolve_model("demo"), path)
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=0), adapter=name)[
            0
        ]
        completion = output.outputs[0]
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *completion.token_ids]]), use_cache=False).logits[0]
        drawn = logits[len(ids) - 1 : -1]
        assert drawn.argmax(-1).tolist() == completion.token_ids
        scored = [next(iter(position.values())).logprob for position in completion.logprobs]
        expected = torch.log_softmax(drawn, -1)[range(12), completion.token_ids]
        assert (torch.tensor(scored) - expected).abs().max() < 1e-4


def test_loading_and_unloading(llm: LLM) -> None:
    expected = texts(llm, ["scripture"])
    info = llm.load_adapter("kjv", "scripture")
    assert (info.name, info.identity) == (
        "kjv",
        {i.name: i for i in llm.list_adapters()}["scripture"].identity,
    )
    assert info.report.applied
    assert texts(llm, ["kjv"]) == expected
    llm.load_adapter("kjv", llm.root / "shakespeare")  # type: ignore[attr-defined]
    assert texts(llm, ["kjv"]) == texts(llm, ["shakespeare"])
    assert llm.unload_adapter("kjv")
    with pytest.raises(
        ValueError, match=r"^adapter: 'kjv' is unknown; there is python, scripture, shakespeare"
    ):
        llm.generate(PROMPT, adapter="kjv")
    with pytest.raises(ValueError, match=r"^adapter: 'kjv' is unknown"):
        llm.unload_adapter("kjv")


def test_a_stream_goes_on_while_its_adapter_is_replaced_and_unloaded(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    (expected,) = texts(llm, ["python"], params=params)
    llm.load_adapter("n", "python")
    stream = llm.stream(PROMPT, params, adapter="n")
    begin = next(stream)
    llm.load_adapter("n", "scripture")
    assert texts(llm, ["n"]) == texts(llm, ["scripture"])
    assert llm.unload_adapter("n")  # scripture goes by its own name as well
    assert begin + "".join(stream) == expected


def test_s030_a_stream_is_bound_when_it_is_asked_for(llm: LLM) -> None:
    """Not when its first piece is."""
    (expected,) = texts(llm, ["python"])
    llm.load_adapter("n", "python")
    streams = [llm.stream(PROMPT, GREEDY, adapter="n") for _ in range(2)]
    llm.load_adapter("n", "scripture")
    assert llm.unload_adapter("n")
    assert ["".join(stream) for stream in streams] == [expected] * 2
    with pytest.raises(ValueError, match=r"^adapter: 'n' is unknown"):
        llm.stream(PROMPT, GREEDY, adapter="n")


def test_a_stream_that_nobody_begins_leaves_nothing(llm: LLM) -> None:
    for end in ("close", "forget"):
        stream = llm.stream(PROMPT, GREEDY, adapter="python")
        assert {i.name: i.num_refs for i in llm.list_adapters()}["python"] == 1
        if end == "close":
            stream.close()
            assert list(stream) == []
        del stream
        assert all(info.num_refs == 0 for info in llm.list_adapters())
        assert llm.stats()["num_waiting"] == 0


def test_a_load_lets_others_go_on_and_loses_nothing_of_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (expected,) = texts(llm, ["python"], params=params)
    stream = llm.stream(PROMPT, params, adapter="python")
    text = next(stream)
    before = llm.stats()["num_steps"]
    llm.load_adapter("n", "scripture")
    assert llm.stats()["num_steps"] > before
    assert text + "".join(stream) == expected
    assert llm.unload_adapter("n")


def test_a_load_that_is_broken_off_does_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._core.adapters, "wait", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.load_adapter("n", "scripture")
    llm.load_adapter("m", "shakespeare")  # comes after it
    assert [info.name for info in llm.list_adapters()] == ["m", *NAMES]
    assert llm.unload_adapter("m")


def test_stop_strings_and_closed_streams_return_references(llm: LLM) -> None:
    (text,) = texts(llm, ["python"])
    stop = SamplingParams(temperature=0, max_tokens=12, stop=(text[3:6],), n=2)
    (output,) = llm.generate(PROMPT, stop, adapter="python")
    assert [each.finish_reason for each in output.outputs] == ["stop", "stop"]
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=50), adapter="python")
    next(stream)
    assert {i.name: i.num_refs for i in llm.list_adapters()}["python"] == 1
    stream.close()
    assert all(info.num_refs == 0 for info in llm.list_adapters())


def test_nothing_is_kept_of_requests_that_are_refused(llm: LLM) -> None:
    before = llm.stats()
    with pytest.raises(ValueError, match=r"^adapter: "):
        llm.generate([PROMPT] * 3, GREEDY, adapter=["python", "scripture", "milton"])
    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate([[5] * 300], GREEDY, adapter="python")
    assert llm.stats() == before
    assert all(info.num_refs == 0 for info in llm.list_adapters())


@pytest.mark.parametrize(
    "name", ["../x", "/etc", "a/../../b", "a\0b", "x" * 10_000, "\u0430dmin", "", "demo", 3, None]
)
def test_s025_l060_names(llm: LLM, name: Any) -> None:
    with pytest.raises(ValueError, match=r"^adapter: "):
        llm.load_adapter(name, "python")
    with pytest.raises(ValueError, match=r"^adapter: "):
        llm.unload_adapter(name)


@pytest.mark.parametrize(
    "path", ["../x", "/etc", "link", "python/../../x", "a\0b", "x" * 10_000, "", 3, None, "."]
)
def test_s025_paths(llm: LLM, path: Any, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED["python"], tmp_path / "outside")
    link = llm.root / "link"  # type: ignore[attr-defined]
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"^path: "):
        llm.load_adapter("x", path)
    assert [info.name for info in llm.list_adapters()] == list(NAMES)


def test_s004_pickles_are_refused_unread(llm: LLM) -> None:
    folder = llm.root / "pickled"  # type: ignore[attr-defined]
    shutil.copytree(BUNDLED["python"], folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin.*safetensors"):
        llm.load_adapter("x", "pickled")


def test_runtime_loading_is_refused_unless_it_is_allowed() -> None:
    with demo() as llm:
        for action in (lambda: llm.load_adapter("x", "python"), lambda: llm.unload_adapter("python")):
            with pytest.raises(ValueError, match=r"^lora\.allow_runtime_loading: is off"):
                action()
        assert len(llm.list_adapters()) == 3


def test_without_adapters_nothing_is_there() -> None:
    with demo(adapters={}) as llm:
        assert llm.plan.lora is None
        assert "lora" not in llm.plan.backends
        assert llm.list_adapters() == []
        with pytest.raises(
            ValueError, match=r"^adapter: 'python' is unknown; this engine serves the base model"
        ):
            llm.generate(PROMPT, adapter="python")
        with pytest.raises(ValueError, match="allow_runtime_loading"):
            llm.load_adapter("x", "python")
        assert llm.generate(PROMPT, GREEDY)


def test_what_is_configured_replaces_what_is_bundled() -> None:
    with demo(adapters={"bard": BUNDLED["shakespeare"]}) as llm:
        assert [info.name for info in llm.list_adapters()] == ["bard"]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"adapters": {"x": "/nothing"}}, r"^lora\.adapters\.x: .*/nothing"),
        ({"adapters": {"../x": "/nothing"}}, r"lora\.adapters\.\.\./x: '\.\./x': a name is 1 to 64"),
        ({"adapters": {"demo": "/nothing"}}, r"lora\.adapters\.demo: is a name of the base model"),
        ({"max_rank": 8}, r"^lora\.adapters\.python: .*lora\.max_rank \(8\)"),
        ({"device_bytes": 1000}, r"^lora\.adapters\.python: .*lora\.device_bytes is 1,000"),
        ({"max_loaded": 0}, r"lora\.max_loaded: 0"),
        ({"max_load": 1}, r"did you mean 'lora\.max_loaded'"),
    ],
)
def test_bad_settings_name_their_key(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        demo(**lora)


def test_l059_pins(llm: LLM) -> None:
    """Two slots: one pinned, the others take turns in what is left, and the last can't be pinned."""
    llm.pin_adapter("python")
    with pytest.raises(ValueError, match=r"^adapter: 'scripture' can't be pinned"):
        llm.pin_adapter("scripture")
    for name in ("scripture", "shakespeare", None, "python", "scripture"):
        texts(llm, [name])
        states = {info.name: (info.state, info.is_pinned) for info in llm.list_adapters()}
        assert states["python"] == ("device", True)
    llm.unpin_adapter("python")
    for name in ("scripture", "shakespeare"):
        texts(llm, [name])
    assert {info.name: info.state for info in llm.list_adapters()}["python"] == "host"
    with pytest.raises(ValueError, match=r"^adapter: 'x' is unknown"):
        llm.pin_adapter("x")


def test_stats_by_adapter(llm: LLM) -> None:
    before = llm.stats()["adapters"].get("python", {}).get("num_generated_tokens", 0)
    texts(llm, ["python", None])
    stats = llm.stats()
    assert stats["adapters"]["python"]["num_generated_tokens"] == before + 12
    assert stats["num_adapters"] == 3
    assert 0 < stats["num_adapters_on_device"] <= 2
    assert stats["adapter_device_bytes"] <= 2 * 700_000


def test_watching_a_batch(llm: LLM) -> None:
    seen = ["", ""]

    def watch(index: int, piece: str) -> None:
        seen[index] += piece

    outputs = llm.generate([PROMPT, "And"], GREEDY, adapter=[None, "scripture"], watch=watch)
    assert seen == [output.outputs[0].text for output in outputs]


def loader_threads() -> int:
    gc.collect()
    return sum(thread.name == "hybridserve-adapters" for thread in threading.enumerate())


def test_closing_ends_the_loaders_thread() -> None:
    before = loader_threads()
    llm = demo()
    texts(llm, ["python"])
    assert loader_threads() == before + 1
    llm.close()
    assert loader_threads() == before
    with pytest.raises(RuntimeError, match="closed"):
        llm.list_adapters()


def test_a_root_that_is_not_there_is_warned_of(tmp_path: Path) -> None:
    roots = [str(tmp_path), str(tmp_path / "later")]
    with pytest.warns(UserWarning, match=r"^lora\.roots: no such directory: .*later$") as warned:
        demo(allow_runtime_loading=True, roots=roots).close()
    assert len(warned) == 1


def test_stats_of_a_closed_one_are_refused() -> None:
    llm = demo(adapters={})
    llm.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        llm.stats()

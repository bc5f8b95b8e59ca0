"""The same beginning, continued by the base model and by adapters that a directory holds, in one batch."""

from pathlib import Path

import hybridserve
from hybridserve import LLM, SamplingParams

adapters = Path(hybridserve.__file__).parent / "models" / "demo" / "adapters"
params = SamplingParams(temperature=0.7, top_k=40, max_tokens=30, seed=1)

with LLM("demo", lora={"adapters": {}, "allow_runtime_loading": True, "roots": [adapters]}) as llm:
    for name in ("scripture", "shakespeare"):
        info = llm.load_adapter(name, name)  # under one of the roots
        print(f"{name}: rank {info.rank}, {len(info.report.applied)} modules, {info.num_bytes:,} bytes")

    names = [None, "scripture", "shakespeare"]
    for output in llm.generate(["The people of the"] * len(names), params, adapter=names):
        print(f"\n[{output.adapter or 'base'}] {output.prompt}{output.outputs[0].text}")

    print(f"\nunloaded at once: {llm.unload_adapter('scripture')}")

"""Read prompts from a file of JSON lines, write the results to another one.

`hybridserve generate demo --prompts examples/prompts.jsonl --out results.jsonl` does the same from a shell.
"""

import json
import sys
from pathlib import Path

from hybridserve import LLM, SamplingParams

source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("prompts.jsonl")
target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("results.jsonl")

requests = [json.loads(line) for line in source.read_text().splitlines()]
prompts = [request.pop("prompt") for request in requests]
params = [SamplingParams(**({"temperature": 0.7, "seed": 0} | request)) for request in requests]

with LLM("demo") as llm, target.open("w") as results:
    for output in llm.generate(prompts, params):
        completion = output.outputs[0]
        results.write(json.dumps({"text": completion.text, "finish_reason": completion.finish_reason}) + "\n")
print(f"{len(prompts)} results in {target}")

"""An engine from a YAML file with one key changed; its plan, an answer and a streamed continuation."""

from pathlib import Path

from hybridserve import LLM, SamplingParams

config = Path(__file__).parents[1] / "configs" / "demo-cpu.yaml"

with LLM(config=config, max_num_seqs=8) as llm:
    print(llm.plan.table(), "\n")

    chat = [{"role": "user", "content": "What is the climate of the island?"}]
    answer = llm.chat(chat, SamplingParams(temperature=0.7, top_k=40, max_tokens=30, seed=1))[0]
    print(answer.outputs[0].text, "\n")

    for piece in llm.stream("The people of the", SamplingParams(temperature=0.7, max_tokens=30, seed=1)):
        print(piece, end="", flush=True)
    print()

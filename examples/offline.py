"""Continue several prompts at once, each with its own sampling."""

from hybridserve import LLM, SamplingParams

prompts = ["The people of the", "It is a truth universally acknowledged,", "The climate is"]
params = [
    SamplingParams(temperature=0.7, top_k=40, max_tokens=30, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=30, seed=2),
    SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.3),
]

with LLM("demo") as llm:
    for output in llm.generate(prompts, params):
        completion = output.outputs[0]
        print(f"{output.prompt}{completion.text}")
        print(f"    [{completion.finish_reason}, {len(completion.token_ids)} tokens]\n")

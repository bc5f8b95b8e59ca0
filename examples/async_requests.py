"""Serve several requests at once from asyncio; the engine runs in a process of its own."""

import asyncio

from hybridserve import AsyncLLM, SamplingParams


async def tell(engine: AsyncLLM, prompt: str, adapter: str | None) -> str:
    params = SamplingParams(temperature=0.7, top_k=40, max_tokens=30, seed=1)
    async for output in engine.generate(prompt, params, adapter=adapter):
        if len(output.outputs[0].token_ids) == 10:
            print(f"[{adapter or 'base'}] has ten tokens")
    return f"[{adapter or 'base'}] {prompt}{output.outputs[0].text}"


async def give_up(engine: AsyncLLM) -> str:
    async for output in engine.generate("Once", SamplingParams(max_tokens=1000), request_id="long"):
        if not output.finished:
            await engine.abort("long")
    return f"aborted after {len(output.outputs[0].token_ids)} tokens: {output.outputs[0].finish_reason}"


async def main() -> None:
    async with AsyncLLM("demo", max_num_seqs=8) as engine:
        names = [None, *(info.name for info in await engine.list_adapters())]
        texts = await asyncio.gather(*(tell(engine, "The king", name) for name in names), give_up(engine))
        print("\n".join(texts))
        stats = await engine.stats()
        print(f"{stats['num_generated_tokens']} tokens in {stats['num_steps']} steps")


asyncio.run(main())

// OpenAI's client for Node against a server: `node openai.mjs BASE_URL`. Exits with 1 at the first surprise.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "what is the time?" }];
const greedy = { model: "demo", temperature: 0, max_tokens: 12 };

const names = [];
for await (const card of client.models.list()) names.push(card.id);
assert.deepEqual(names, ["demo", "bard", "kjv"]);

const whole = await client.chat.completions.create({ ...greedy, messages });
assert.equal(whole.choices[0].finish_reason, "length");
assert.equal(whole.usage.completion_tokens, 12);

const chunks = [];
const asked = { ...greedy, messages, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(asked)) chunks.push(chunk);
const last = chunks.pop();
assert.deepEqual(last.choices, []);
assert.deepEqual(last.usage, whole.usage);
assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
assert.equal(chunks.filter((chunk) => chunk.choices[0].finish_reason).length, 1);

const texts = ["", "", ""];
const several = { model: "demo", prompt: "for the", n: 3, seed: 5, max_tokens: 10 };
for await (const chunk of await client.completions.create({ ...several, stream: true })) {
  for (const choice of chunk.choices) texts[choice.index] += choice.text;
}
const together = await client.completions.create(several);
assert.deepEqual(texts, together.choices.map((choice) => choice.text));

const collected = client.chat.completions.stream({ ...greedy, messages });
assert.equal(await collected.finalContent(), whole.choices[0].message.content);

const bard = await client.completions.create({ ...greedy, model: "bard", prompt: "And the" });
const base = await client.completions.create({ ...greedy, prompt: "And the" });
assert.notEqual(bard.choices[0].text, base.choices[0].text);

const schema = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
const formed = await client.chat.completions.create({
  model: "demo",
  messages,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "answer", schema } },
});
assert.equal(typeof JSON.parse(formed.choices[0].message.content).yes, "boolean");

const parameters = { type: "object", properties: { city: { enum: ["Wien", "Linz"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const calling = client.chat.completions.stream({ model: "demo", messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 400 });
const called = (await calling.finalMessage()).tool_calls;
assert.equal(called.length, 1);
assert.equal(called[0].function.name, "weather");
assert.ok(["Wien", "Linz"].includes(JSON.parse(called[0].function.arguments).city));

await assert.rejects(client.completions.create({ ...greedy, prompt: "a", temperature: -1 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  assert.ok(error.requestID);
  return true;
});
await assert.rejects(client.completions.create({ ...greedy, model: "nobody", prompt: "a" }), OpenAI.NotFoundError);

const endless = await client.completions.create({ model: "demo", prompt: "a", max_tokens: 2000, ignore_eos: true, stream: true });
for await (const chunk of endless) {
  assert.ok(chunk.choices.length === 1);
  break; // which closes the connection
}
console.log("all is well");

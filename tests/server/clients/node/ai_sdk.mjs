// The AI SDK against a server: `node ai_sdk.mjs BASE_URL`. Exits with 1 at the first surprise.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, Output, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "hybridserve",
  baseURL: process.argv[2],
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { temperature: 0, maxOutputTokens: 12, maxRetries: 0, messages: [{ role: "user", content: "what is the time?" }] };

const whole = await generateText({ ...asked, model: provider("demo") });
assert.equal(whole.finishReason, "length");
assert.equal(whole.usage.outputTokens, 12);
assert.ok(whole.usage.inputTokens > 0);

const stream = streamText({ ...asked, model: provider("demo") });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal(await stream.finishReason, "length");
assert.deepEqual((await stream.usage).totalTokens, whole.usage.totalTokens);

const bard = await generateText({ ...asked, model: provider("bard") });
assert.notEqual(bard.text, whole.text);

const completion = await generateText({ ...asked, messages: undefined, prompt: "for the", model: provider.completionModel("demo") });
assert.equal(completion.usage.outputTokens, 12);

const schema = jsonSchema({
  type: "object",
  properties: { name: { type: "string", enum: ["Ann", "Bob"] } },
  required: ["name"],
  additionalProperties: false,
});
const formed = await generateText({ ...asked, maxOutputTokens: 200, model: provider("demo"), output: Output.object({ schema }) });
assert.ok(["Ann", "Bob"].includes(formed.output.name));

const inputSchema = jsonSchema({ type: "object", properties: { city: { enum: ["Wien", "Linz"] } }, required: ["city"], additionalProperties: false });
const calling = { ...asked, maxOutputTokens: 400, model: provider("demo"), tools: { weather: tool({ inputSchema }) }, toolChoice: "required" };
const once = await generateText(calling);
assert.equal(once.finishReason, "tool-calls");
assert.ok(once.toolCalls.every((call) => call.toolName === "weather" && ["Wien", "Linz"].includes(call.input.city)));
const streamed = await streamText(calling).toolCalls;
assert.ok(streamed.length > 0 && streamed.every((call) => ["Wien", "Linz"].includes(call.input.city)));

await assert.rejects(generateText({ ...asked, model: provider("nobody") }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 404);
  return true;
});

const failed = [];
const refused = streamText({ ...asked, temperature: -1, model: provider("demo"), onError: ({ error }) => failed.push(error) });
for await (const piece of refused.textStream) assert.fail(piece);
assert.equal(failed[0].statusCode, 400);

const leaving = new AbortController();
const endless = streamText({ ...asked, maxOutputTokens: 1900, model: provider("demo"), abortSignal: leaving.signal, onError: () => {} });
for await (const piece of endless.textStream) {
  assert.equal(typeof piece, "string");
  leaving.abort();
}
console.log("all is well");

// A tool call, a structured answer and a stream with Vercel's `ai` package.
//
//     node vercel_ai.mjs http://127.0.0.1:8000

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const provider = createOpenAICompatible({
  name: "cearx",
  baseURL: `${url}/v1`,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const { data } = await (await fetch(`${url}/v1/models`)).json();
const model = provider(data[0].id);

const asked = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 150 };
const city = z.object({ city: z.string().max(12) });

let heard = null;
const weather = tool({
  description: "Weather of a city",
  inputSchema: city,
  execute: async (input) => {
    heard = input;
    return "Sunny";
  },
});
const called = await generateText({
  ...asked,
  prompt: "What is the weather in Paris?",
  tools: { get_weather: weather },
  toolChoice: "required",
});
assert.equal(called.toolCalls[0].toolName, "get_weather");
assert.deepEqual(heard, called.toolCalls.at(-1).input);

const { object } = await generateObject({
  ...asked,
  schema: z.object({ name: z.string().max(12), isCapital: z.boolean() }),
  prompt: "Describe the city of Paris as JSON.",
});
assert.equal(typeof object.isCapital, "boolean");

const stream = streamText({ ...asked, prompt: "What is the capital of France?" });
let joined = "";
for await (const piece of stream.textStream) joined += piece;
assert.match(joined, /Paris/);
assert.ok((await stream.usage).outputTokens > 0);

console.log("vercel ai:", called.toolCalls[0].input, object, joined);

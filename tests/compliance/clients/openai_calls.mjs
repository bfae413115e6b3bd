// 40 calls of OpenAI's own client for Node, each answer checked by content.
//
//     node openai_calls.mjs http://127.0.0.1:8000
//
// Ends with exit code 1 when an answer is wrong.

import assert from "node:assert/strict";
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const hello = [{ role: "user", content: "What is the capital of France?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, big: { type: "boolean" } },
  required: ["city", "big"],
  additionalProperties: false,
};
const described = { name: "get_weather", description: "Weather of a city", parameters: schema };
const tool = { type: "function", function: described };
const format = { type: "json_schema", json_schema: { name: "x", schema, strict: true } };
const call = { id: "c1", type: "function", function: { name: "get_weather", arguments: "{}" } };
const named = { type: "function", function: { name: "get_weather" } };

const plain = { model, messages: hello, temperature: 0, max_tokens: 8 };
const chat = (fields) => client.chat.completions.create({ ...plain, ...fields });
const text = (answer) => answer.choices[0].message.content;
const complete = (fields) =>
  client.completions.create({ model, prompt: "The capital of France is", temperature: 0, ...fields });
const respond = (fields) =>
  client.responses.create({
    model, input: hello[0].content, temperature: 0, max_output_tokens: 40, ...fields,
  });

async function streamed(fields) {
  const whole = await chat(fields);
  const stream = client.chat.completions.stream({ ...plain, ...fields });
  const joined = await stream.finalChatCompletion();
  assert.equal(text(joined), text(whole));
  assert.equal(joined.choices[0].finish_reason, whole.choices[0].finish_reason);
  return joined;
}

async function refused(promise, status, param) {
  await assert.rejects(promise, (error) => error.status === status && error.param === param);
}

// Name: what is called and checked; how many calls it makes stands behind, where it is not one.
const cases = {
  "models.list": async () => assert.equal((await client.models.list()).data.length, 1),
  "models.retrieve": async () => assert.equal((await client.models.retrieve(model)).id, model),
  plain: async () => assert.match(text(await chat({})), /Paris/),
  system: async () =>
    assert.ok(text(await chat({ messages: [{ role: "system", content: "Be brief." }, ...hello] }))),
  developer: async () =>
    assert.ok(text(await chat({ messages: [{ role: "developer", content: "Hm." }, ...hello] }))),
  turns: async () => {
    const messages = [...hello, { role: "assistant", content: "Paris." }, ...hello];
    assert.ok((await chat({ messages })).usage.prompt_tokens > 50);
  },
  parts: async () => {
    const content = [{ type: "text", text: "Say yes." }];
    assert.ok(text(await chat({ messages: [{ role: "user", content }] })));
  },
  choices: async () => assert.equal((await chat({ n: 3, temperature: 1 })).choices.length, 3),
  stop: async () => assert.doesNotMatch(text(await chat({ stop: ["Paris"] })), /Paris/),
  logprobs: async () => {
    const answer = await chat({ logprobs: true, top_logprobs: 3 });
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 3);
  },
  logit_bias: async () =>
    assert.equal(new Set(text(await chat({ logit_bias: { 42: 100 } }))).size, 1),
  limit: async () =>
    assert.equal((await chat({ max_completion_tokens: 3 })).usage.completion_tokens, 3),
  penalties: async () => assert.ok(text(await chat({ presence_penalty: 1, frequency_penalty: 1 }))),
  hints: async () => assert.ok(text(await chat({ user: "u", metadata: { a: "b" }, store: false }))),
  effort: async () => assert.ok(text(await chat({ reasoning_effort: "low" }))),
  extensions: async () => assert.ok(text(await chat({ top_k: 1, min_p: 0.1, ignore_eos: true }))),
  json_object: async () =>
    assert.match(text(await chat({ response_format: { type: "json_object" } })), /^\{/),
  json_schema: async () => {
    const found = JSON.parse(text(await chat({ response_format: format, max_tokens: 80 })));
    assert.deepEqual(Object.keys(found), ["city", "big"]);
  },
  required: async () => {
    const answer = await chat({ tools: [tool], tool_choice: "required", max_tokens: 120 });
    assert.equal(answer.choices[0].message.tool_calls[0].function.name, "get_weather");
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
  },
  named: async () => {
    const answer = await chat({ tools: [tool], tool_choice: named, max_tokens: 80 });
    JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  result: async () => {
    const messages = [
      ...hello,
      { role: "assistant", tool_calls: [call] },
      { role: "tool", tool_call_id: "c1", content: "Sunny" },
    ];
    assert.ok(text(await chat({ messages })));
  },
  "stream (2)": () => streamed({}),
  "stream with logprobs (2)": () => streamed({ logprobs: true }),
  "stream with usage (2)": async () => {
    const stream = await client.chat.completions.create({
      ...plain, stream: true, stream_options: { include_usage: true },
    });
    let last;
    for await (const chunk of stream) last = chunk;
    assert.deepEqual(last.choices, []);
    assert.deepEqual(last.usage, (await chat({})).usage);
  },
  "stream of a call": async () => {
    const asked = { ...plain, tools: [tool], tool_choice: "required", max_tokens: 120 };
    const joined = await client.chat.completions.stream(asked).finalChatCompletion();
    JSON.parse(joined.choices[0].message.tool_calls[0].function.arguments);
  },
  completion: async () => assert.match((await complete({})).choices[0].text, /Paris/),
  "completion of ids": async () =>
    assert.equal((await complete({ prompt: [504, 253] })).usage.prompt_tokens, 2),
  "completions of several": async () =>
    assert.equal((await complete({ prompt: ["One", "Two"], n: 2 })).choices.length, 4),
  "completion with echo": async () => {
    const [choice] = (await complete({ echo: true, logprobs: 1, max_tokens: 1 })).choices;
    assert.match(choice.text, /^The capital of France is/);
    assert.equal(choice.logprobs.token_logprobs[0], null);
  },
  "completion stream": async () => {
    let joined = "";
    for await (const chunk of await complete({ stream: true })) joined += chunk.choices[0].text;
    assert.match(joined, /Paris/);
  },
  response: async () => assert.match((await respond({})).output_text, /Paris/),
  "response with schema": async () => {
    const asked = { text: { format: { type: "json_schema", name: "x", schema } } };
    JSON.parse((await respond(asked)).output_text);
  },
  "response with a call": async () => {
    const tools = [{ type: "function", strict: true, ...described }];
    const answer = await respond({ tools, tool_choice: { type: "function", name: "get_weather" } });
    assert.equal(answer.output[0].type, "function_call");
  },
  "response with logprobs": async () => {
    const asked = { include: ["message.output_text.logprobs"], top_logprobs: 2 };
    const answer = await respond(asked);
    const told = answer.output[0].content[0].logprobs.map((record) => record.token);
    assert.equal(told.join(""), answer.output_text);
  },
  "response stream": async () => {
    const asked = { model, input: hello[0].content, temperature: 0, max_output_tokens: 40 };
    assert.match((await client.responses.stream(asked).finalResponse()).output_text, /Paris/);
  },
  "no such model": () => refused(chat({ model: "gpt-4" }), 404, "model"),
  "too hot": () => refused(chat({ temperature: 9 }), 400, "temperature"),
};

let calls = 0;
let faults = 0;
for (const [name, run] of Object.entries(cases)) {
  calls += Number(/\((\d)\)$/.exec(name)?.[1] ?? 1);
  try {
    await run();
  } catch (error) {
    faults += 1;
    console.log(`${name}: ${error.stack}`);
  }
}
console.log(`openai for Node: ${calls} calls, ${faults} of ${Object.keys(cases).length} cases failed`);
process.exitCode = faults ? 1 : 0;

// The official OpenAI client for Node: URL, MODEL and the name of what to do.

import OpenAI from "openai";

const [url, model, name] = process.argv.slice(2);
let requests = 0;
const counting = (...given) => {
  requests += 1;
  return fetch(...given);
};
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", fetch: counting });
const greedy = { model, max_tokens: 8, temperature: 0, seed: 7 };
const asked = { ...greedy, prompt: "Count: 1 2 3", stop: null, suffix: null, logprobs: null };
const turns = (mark) => [
  { role: "user", content: "Count." },
  { role: "assistant", content: "Count: 1 2 3", ...mark },
];

const all = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};

const failure = async (promise) => {
  try {
    return await promise;
  } catch (error) {
    const { status, message, code, param, type } = error;
    return { kind: error.constructor.name, status, message, code, param, type };
  }
};

const tasks = {
  async completes() {
    return {
      whole: await client.completions.create(asked),
      chunks: await all(await client.completions.create({ ...asked, stream: true })),
    };
  },

  async chats() {
    const plain = { ...greedy, messages: [{ role: "user", content: "Say hello." }] };
    return {
      whole: await client.chat.completions.create(plain),
      chunks: await all(
        await client.chat.completions.create({ ...plain, stream: true, stream_options: { include_usage: true } }),
      ),
    };
  },

  async continues() {
    const texts = {};
    const flags = { continue_final_message: true };
    for (const [mark, message, fields] of [
      ["prefix", { prefix: true }, {}],
      ["partial", { partial: true }, {}],
      ["flags", {}, { ...flags, add_generation_prompt: false }],
      ["echo", {}, { ...flags, echo: true }],
    ]) {
      const given = { ...greedy, messages: turns(message), ...fields };
      const chunks = await all(await client.chat.completions.create({ ...given, stream: true }));
      texts[mark] = {
        whole: (await client.chat.completions.create(given)).choices[0].message.content,
        streamed: chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""),
      };
    }
    return texts;
  },

  async fails() {
    const failures = [
      await failure(client.completions.create({ ...asked, max_tokens: -1 })),
      await failure(client.completions.create({ ...asked, max_tokens: -1, stream: true })),
      await failure(client.chat.completions.create({ ...greedy, messages: turns({ prefix: "yes" }) })),
      await failure(client.completions.create({ ...asked, model: "nowhere" })),
    ];
    return { failures, requests };
  },

  async breaks() {
    const texts = [];
    const reading = async () => {
      for await (const chunk of await client.completions.create({ model, prompt: "x", stream: true }))
        texts.push(chunk.choices[0].text);
    };
    return { failure: await failure(reading()), text: texts.join(""), requests };
  },

  async leaves() {
    const stream = await client.completions.create({ ...asked, max_tokens: 3000, stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0].text) break;
    }
    const counts = async () => (await (await fetch(`${url}/health`)).json()).models[model];
    const end = Date.now() + 2000;
    while ((await counts()).running && Date.now() < end);
    return await counts();
  },

  async reports() {
    const given = { ...asked, foo: 1, top_a: 0.2 };
    const { data, response } = await client.completions.create(given).withResponse();
    const streamed = await client.completions.create({ ...given, stream: true }).withResponse();
    const before = streamed.response.headers.get("legato-ignored");
    return {
      whole: response.headers.get("legato-ignored"),
      streamed: before,
      text: data.choices[0].text,
      streamed_text: (await all(streamed.data)).map((chunk) => chunk.choices[0].text).join(""),
    };
  },
};

console.log(JSON.stringify(await tasks[name]()));

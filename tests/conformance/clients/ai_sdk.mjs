// Vercel's AI SDK and its providers: URL, MODEL and the name of what to do.

import { createDeepSeek } from "@ai-sdk/deepseek";
import { createMistral } from "@ai-sdk/mistral";
import { createMoonshotAI } from "@ai-sdk/moonshotai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, name, task] = process.argv.slice(2);
const apiKey = "any";
const compatible = createOpenAICompatible({ name: "legato", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const deepseek = (base) => createDeepSeek({ baseURL: url + base, apiKey })(name);
const moonshot = createMoonshotAI({ baseURL: `${url}/v1`, apiKey })(name);
const mistral = createMistral({ baseURL: `${url}/v1`, apiKey })(name);
const options = { maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const turns = (providerOptions) => [
  { role: "user", content: "Count." },
  { role: "assistant", content: "Count: 1 2 3", providerOptions },
];

const both = async (given) => {
  const { text, finishReason, usage } = await generateText({ ...options, ...given });
  const streamed = streamText({ ...options, ...given });
  const pieces = [];
  for await (const piece of streamed.textStream) pieces.push(piece);
  return {
    whole: { text, finish: finishReason, output: usage.outputTokens },
    streamed: {
      text: pieces.join(""),
      finish: await streamed.finishReason,
      output: (await streamed.usage).outputTokens,
    },
    pieces: pieces.length,
  };
};

const failure = async (given) => {
  try {
    return await generateText({ ...options, ...given });
  } catch (error) {
    return { kind: error.name, message: error.message, status: error.statusCode ?? null };
  }
};

const tasks = {
  async generates() {
    return {
      completion: await both({ model: compatible.completionModel(name), prompt: "Count: 1 2 3" }),
      chat: await both({ model: compatible(name), prompt: "Say hello." }),
    };
  },

  async continues() {
    return {
      compatible: await both({ model: compatible(name), messages: turns({ openaiCompatible: { prefix: true } }) }),
      deepseek: await both({ model: deepseek("/beta"), messages: turns({ deepseek: { prefix: true } }) }),
      moonshotai: await both({ model: moonshot, messages: turns({ moonshotai: { partial: true } }) }),
      mistral: await both({ model: mistral, messages: turns() }),
    };
  },

  async fails() {
    const asked = { prompt: "Count.", temperature: 3 };
    return {
      compatible: await failure({ ...asked, model: compatible(name) }),
      deepseek: await failure({ ...asked, model: deepseek("/beta") }),
      unsent: await failure({ model: deepseek("/v1"), messages: turns({ deepseek: { prefix: true } }) }),
    };
  },
};

console.log(JSON.stringify(await tasks[task]()));

// bitnet for people who build pages: `import { load } from "bitnet"`. Serve this folder with your page, from its origin.

import { Engine } from "./engine/client.js";

const BASE = new URL("./", import.meta.url);

/** A loaded model. */
class Model {
  constructor(engine, name, device) {
    Object.assign(this, { engine, name, device });
  }

  async post(messages, { signal, ...fields }) {
    const body = JSON.stringify({ model: this.name, ...fields, messages });
    const headers = { "Content-Type": "application/json" };
    const response = await this.fetch("/v1/chat/completions", { method: "POST", headers, body, signal });
    if (response.ok) return response;
    const { error } = await response.json();
    throw new Error(error?.message ?? `The engine answered with status ${response.status}.`);
  }

  async chat(messages, options = {}) {
    const { choices } = await (await this.post(messages, options)).json();
    return choices[0].message.content ?? "";
  }

  async *stream(messages, options = {}) {
    const response = await this.post(messages, { ...options, stream: true });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) throw new Error("The answer broke off before its end.");
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          if (!line.startsWith("data:")) continue;
          const data = line.slice(5).trim();
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Error(chunk.error.message);
          const text = chunk.choices[0]?.delta.content;
          if (text) yield text;
        }
      }
    } finally {
      await reader.cancel().catch(() => {}); // whoever leaves the loop ends the generation
    }
  }

  fetch(path, options) {
    return this.engine.fetch(path, options);
  }

  close() {
    this.engine.end("The model was closed.");
  }
}

export async function load({ model, sha256, device, context, signal, progress = () => {} } = {}) {
  const engine = new Engine();
  engine.onKernels = (done, total) => progress({ stage: "kernels", done, total });
  const call = (type, values) => engine.call(type, values, { signal, progress: ({ stage, done, total }) => progress({ stage, done, total }) });
  try {
    await call("start", { device, context });
    let name;
    if (model instanceof Blob) name = await call("add", { file: model });
    else {
      const site = await (await fetch(new URL("site.json", BASE), { signal })).json();
      const offered = site.models.find((one) => one.name === (model ?? site.models[0]?.name));
      const stored = await call("models");
      if (offered && stored.some((one) => one.name === offered.name)) name = offered.name;
      else if (offered) name = await call("add", { ...offered, url: new URL(offered.path, BASE).href });
      else name = await call("add", { text: String(model), ...(sha256 && { sha256 }) });
    }
    return new Model(engine, name, await call("load", { name }));
  } catch (error) {
    engine.end();
    throw error;
  }
}

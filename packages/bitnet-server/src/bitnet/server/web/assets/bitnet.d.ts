/** How far loading is. `done` and `total` are bytes of the model, or kernels; they may be missing. */
export interface Progress {
  stage: "python" | "numpy" | "packages" | "model" | "kernels";
  done?: number;
  total?: number;
}

export interface LoadOptions {
  /** A model that the folder offers (by default the first), an address, `ORG/NAME:FILE` on the Hugging Face Hub, or a file. */
  model?: string | URL | Blob;
  /** The SHA-256 that the file at the address must have, in hexadecimal digits. */
  sha256?: string;
  /** By default the browser's GPU, else the CPU. */
  device?: "auto" | "webgpu" | "cpu";
  /** Maximum tokens of a conversation. */
  context?: number;
  signal?: AbortSignal;
  progress?: (progress: Progress) => void;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string;
}

/** Fields of OpenAI's chat completions, besides `messages`. */
export interface ChatOptions {
  signal?: AbortSignal;
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  seed?: number;
  stop?: string | string[];
  [field: string]: unknown;
}

export interface Model {
  readonly name: string;
  /** Such as `webgpu:0` or `cpu:simd128`. */
  readonly device: string;
  /** The whole answer. Rejects with an `AbortError` if it is aborted. */
  chat(messages: Message[], options?: ChatOptions): Promise<string>;
  /** The answer piece by piece. Leaving the loop ends the generation. */
  stream(messages: Message[], options?: ChatOptions): AsyncGenerator<string, void, void>;
  /** Any request of `bitnet serve`'s API, such as `/v1/completions`; the path begins with a slash. */
  fetch(path: string, options?: RequestInit): Promise<Response>;
  /** Ends the engine and frees its memory. */
  close(): void;
}

/** Loads a model into a worker. It is stored in the browser, so that it is downloaded once. */
export function load(options?: LoadOptions): Promise<Model>;

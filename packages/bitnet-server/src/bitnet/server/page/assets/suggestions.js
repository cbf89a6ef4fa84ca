// First questions. The demo model that comes with bitnet is very small: what it is offered is what it can do.

const DEMO = [
  "What is the capital of France?",
  "What is 17 + 25?",
  "How many r's are in strawberry?",
  "Tell me a story about a fox.",
];
const GENERAL = ["Why is the sky blue?", "Write a haiku about winter.", "Explain a hash table with an example in Python."];

export const suggestions = (model) => (model === "bitnet-demo" ? DEMO : GENERAL);

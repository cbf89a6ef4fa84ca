// A worker that makes what the next start uses, with a Python of its own, and ends. It gets `{key, modules, libraries}`: by
// what it is found, and what the engine has loaded.

import * as kept from "./kept.js";
import { make } from "./snapshot.js";

addEventListener("message", async ({ data: { key, modules, libraries } }) => {
  try {
    await kept.keep(key, await make(modules, libraries));
  } finally {
    close();
  }
});

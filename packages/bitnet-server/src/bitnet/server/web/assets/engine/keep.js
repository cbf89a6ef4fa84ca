// A worker that makes what the next start uses, with a Python of its own, and ends. It gets `{files, modules}`: source
// files of the modules that the engine has loaded, and names of those that come with Python.

import { loadPyodide, version } from "./pyodide/pyodide.mjs";
import * as kept from "./kept.js";

// The engine gives these two modules names of `ssl`, which a browser's Python lacks; what imports them waits for it.
const IMPORT = `
import importlib, sys
without = ("http.client", "urllib.request")
sys.modules.update(dict.fromkeys(without))
for name in names:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in without:
    del sys.modules[name]
`;

addEventListener("message", async ({ data: { files, modules } }) => {
  try {
    const archive = await (await fetch(new URL("packages.zip", import.meta.url))).arrayBuffer();
    const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href, _makeSnapshot: true });
    const globals = python.toPy({ names: modules });
    python.runPython(IMPORT, { globals });
    globals.destroy();
    const snapshot = python.makeMemorySnapshot(); // before numpy: libraries are not part of it
    await python.loadPackage("numpy", { messageCallback() {}, errorCallback: console.error });
    python.unpackArchive(archive, "zip", { extractDir: "/packages" });
    python.runPython("import sys; sys.path.insert(0, '/packages')");
    const bytecode = python.pyimport("bitnet.server.web.bytecode").compiled(files).toJs();
    await kept.keep(version, archive, { snapshot, bytecode });
  } finally {
    close();
  }
});

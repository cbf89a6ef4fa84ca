// Runs a Python file in Pyodide on Node. Arguments: Pyodide's folder, the file, then the folders that it imports from.
import { readFile, readdir } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const [distribution, script, ...folders] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${distribution}/pyodide.mjs`));
const pyodide = await loadPyodide({ indexURL: distribution });
if ((await readdir(distribution)).some((name) => name.startsWith("numpy-"))) {
  await pyodide.loadPackage("numpy", { checkIntegrity: false });
}
folders.forEach((folder, i) => pyodide.mountNodeFS(`/folder${i}`, folder));
pyodide.globals.set("folders", pyodide.toPy(folders.map((_, i) => `/folder${i}`)));
pyodide.runPython("import sys; sys.path[:0] = folders");
await pyodide.runPythonAsync(await readFile(script, "utf-8"));

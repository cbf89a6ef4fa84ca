// Runs a Python file in Pyodide on Node. Arguments: the file, then the folders that it imports from.
import { readFile } from "node:fs/promises";
import { loadPyodide } from "pyodide";

const [script, ...folders] = process.argv.slice(2);
const pyodide = await loadPyodide();
folders.forEach((folder, i) => pyodide.mountNodeFS(`/folder${i}`, folder));
pyodide.globals.set("folders", pyodide.toPy(folders.map((_, i) => `/folder${i}`)));
await pyodide.runPythonAsync(`import sys\nsys.path[:0] = folders\n${await readFile(script, "utf-8")}`);

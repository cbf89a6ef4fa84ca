// Python as it is once the server is imported: its memory, which Pyodide keeps, the libraries that it has loaded, which
// Pyodide does not keep, and the files of its packages.
//
// Emscripten's loader notes in Python's memory where a library's data and its functions in the table are (`struct dso`, here
// called a handle). It puts a library whose handle says so there again. Functions get the same places in the table if
// the same libraries are loaded in the same order; `links` tells whether they did.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const PYODIDE = new URL("pyodide/", import.meta.url).href;
const PACKAGES = "/packages";
const FLAGS = { global: false, nodelete: true, allowUndefined: true };
const HANDLE_BYTES = 40;

/** A file of the site, as bytes. */
async function read(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address} answered with HTTP status ${response.status}.`);
  return new Uint8Array(await response.arrayBuffer());
}

/** Python with its packages, from the site's files. `stage(name)` is called as each part begins. */
export async function start(stage = () => {}, options = {}) {
  const archive = read(new URL("packages.zip", import.meta.url));
  const lock = JSON.parse(new TextDecoder().decode(await read(`${PYODIDE}pyodide-lock.json`)));
  const numpy = read(PYODIDE + lock.packages.numpy.file_name);
  archive.catch(() => {}); // both are awaited below
  numpy.catch(() => {});
  const python = await loadPyodide({ indexURL: PYODIDE, ...options });
  stage("numpy");
  python.unpackArchive(await numpy, "zip", { extractDir: PACKAGES });
  stage("packages");
  python.unpackArchive(await archive, "zip", { extractDir: PACKAGES });
  python.runPython(`import sys; sys.path.insert(0, "${PACKAGES}")`);
  return python;
}

/** Libraries that Python has loaded, by path, in their order. */
export const librariesOf = ({ _module: { LDSO } }) => Object.keys(LDSO.loadedLibsByName).filter((path) => path.startsWith(PACKAGES));

/** Loads libraries, `{path, code, handle}`, and returns their handles. A handle that is missing is made. */
function load(module, libraries) {
  return libraries.map(({ path, code, handle = module._calloc(1, HANDLE_BYTES) }) => {
    module.preloadedWasm[path] = module.loadWebAssemblyModule(code, FLAGS, path, {}, handle);
    module.loadDynamicLibrary(path, FLAGS, {});
    return handle;
  });
}

/** A number that tells whether functions and data are where they were. */
function links({ wasmTable, GOT }) {
  let sum = wasmTable.length;
  for (const { value } of Object.values(GOT)) sum = (Math.imul(sum, 31) + value) | 0;
  return sum;
}

/** Makes what `restore` takes, of a Python that has loaded these modules and libraries. */
export async function make(modules, paths) {
  const python = await start(undefined, { _makeSnapshot: true });
  const { _module: module, FS } = python;
  const libraries = paths.map((path) => ({ path, code: new WebAssembly.Module(FS.readFile(path)) }));
  const handles = load(module, libraries);
  const { length } = module.wasmTable;
  const index = { handles, paths, links: links(module) };
  const next = python.pyimport("bitnet.server.web.next_start");
  next.load(modules);
  next.compile_others(PACKAGES);
  next.destroy();
  if (librariesOf(python).length > paths.length || module.wasmTable.length - module.freeTableIndexes.length !== length) {
    throw new Error("Modules have loaded other libraries, or made functions, which are not kept.");
  }
  const snapshot = python.makeMemorySnapshot();
  return { snapshot, files: pack(index, filesOf(FS, PACKAGES)) };
}

/** Python as `make` kept it; takes a promise of the files, and of the snapshot, whose bytes are `size`. Rejects if it cannot be had so. */
export async function restore({ snapshot, size, files }) {
  const unpacked = files.then(unpack);
  const compiled = unpacked.then(({ paths, handles, found }) => Promise.all(paths.map(async (path, i) => ({ path, handle: handles[i], code: await WebAssembly.compile(found.get(path)) }))));
  const all = Promise.all([snapshot, compiled, unpacked]);
  all.catch(() => {}); // awaited below
  globalThis._createPyodideModule = async (settings) => {
    delete globalThis._createPyodideModule; // the next line makes the one whose place this takes
    await import("./pyodide/pyodide.asm.js");
    const module = await globalThis._createPyodideModule({ ...settings, INITIAL_MEMORY: size });
    const [bytes, libraries, { links: expected }] = await all;
    const { restoreSnapshot } = module.API;
    module.API.restoreSnapshot = () => {
      module.API.restoreSnapshot = restoreSnapshot; // or this would hold the bytes
      restoreSnapshot(new Uint8Array(bytes)); // with the handles
      load(module, libraries);
      if (links(module) !== expected) throw new Error("Python’s libraries are not where they were.");
      return restoreSnapshot(new Uint8Array(bytes)); // again, as libraries begin with data of their own
    };
    return module;
  };
  // What it is given is not looked at: WebAssembly is compiled while the snapshot is read.
  const python = await loadPyodide({ indexURL: PYODIDE, _loadSnapshot: new Uint8Array() });
  const folders = new Set();
  for (const [path, data] of (await unpacked).found) {
    const [, folder, name] = path.match(/^(.*)\/(.*)$/);
    if (!folders.has(folder)) python.FS.mkdirTree(folder);
    folders.add(folder);
    python.FS.createDataFile(folder, name, data, true, true, true);
  }
  python.runPython("import random; random.seed()"); // or each start would draw the same numbers
  return python;
}

/** The files below a folder: paths and bytes. */
function filesOf(FS, folder) {
  const names = FS.readdir(folder).filter((name) => name !== "." && name !== "..").map((name) => `${folder}/${name}`);
  return names.flatMap((path) => (FS.isDir(FS.stat(path).mode) ? filesOf(FS, path) : [[path, FS.readFile(path)]]));
}

/** Files as one: the length of its index, the index as JSON, and their bytes. */
function pack(index, files) {
  const sizes = files.map(([path, data]) => [path, data.length]);
  const head = new TextEncoder().encode(JSON.stringify({ ...index, sizes }));
  return new Blob([Uint32Array.of(head.length), head, ...files.map(([, data]) => data)]).arrayBuffer();
}

function unpack(packed) {
  let at = 4 + new Uint32Array(packed, 0, 1)[0];
  const { sizes, ...index } = JSON.parse(new TextDecoder().decode(new Uint8Array(packed, 4, at - 4)));
  const found = new Map();
  for (const [path, size] of sizes) {
    found.set(path, new Uint8Array(packed, at, size));
    at += size;
  }
  return { ...index, found };
}

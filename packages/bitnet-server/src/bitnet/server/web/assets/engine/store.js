// Model files in the browser's private file system (OPFS). For a worker, which may write there piece by piece.

const SUFFIX = ".gguf";
const PART = ".part"; // of a file that is still arriving
const MAGIC = [0x47, 0x47, 0x55, 0x46]; // "GGUF"
const HUB = "https://huggingface.co";

/** What went wrong, in words for whoever sits in front of the page. `code`: quota, cut, hash, format, address or storage. */
export class StoreError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "StoreError";
    this.code = code;
  }
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

async function folder() {
  try {
    const root = await navigator.storage.getDirectory();
    return await root.getDirectoryHandle("bitnet-models", { create: true });
  } catch {
    throw new StoreError("storage", "This browser keeps no files for this page. A private window or a setting may forbid it.");
  }
}

/** The models that are here: `{name, file}`. */
export async function list() {
  const found = [];
  for await (const [name, handle] of (await folder()).entries()) {
    if (name.endsWith(SUFFIX)) found.push({ name: name.slice(0, -SUFFIX.length), file: await handle.getFile() });
  }
  return found.sort((a, b) => (a.name < b.name ? -1 : 1));
}

export async function remove(name) {
  const models = await folder();
  for (const file of [name + SUFFIX, name + SUFFIX + PART, name + SUFFIX + PART + ".json"]) {
    await models.removeEntry(file).catch(() => {});
  }
}

/** A name that a file of an address can have here. */
export const nameOf = (path) => decodeURIComponent(path.split(/[?#]/)[0].split("/").pop()).replace(/\.gguf$/i, "").replace(/[^\w.-]/g, "-") || "model";

async function checkRoom(needed) {
  const { quota, usage } = await navigator.storage.estimate();
  if (quota - usage < needed) {
    throw new StoreError("quota", `The model takes ${megabytes(needed)}; this browser has room for ${megabytes(Math.max(0, quota - usage))}. Remove a model, or free space on the disk.`);
  }
}

/** Writes at the end of a file, and says clearly when the browser's storage is full. */
class Writer {
  static async open(handle) {
    const writer = new Writer();
    try {
      writer.access = await handle.createSyncAccessHandle();
    } catch (error) {
      if (error.name !== "NoModificationAllowedError") throw error;
      throw new StoreError("storage", "Another tab of this page is storing the model. Wait for it, or close it.");
    }
    writer.size = writer.access.getSize();
    return writer;
  }

  write(piece) {
    let written = 0;
    try {
      written = this.access.write(piece, { at: this.size });
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
    }
    if (written !== piece.length) throw new StoreError("quota", `The browser’s storage is full after ${megabytes(this.size)}. Remove a model, or free space on the disk, then start again: it goes on from there.`);
    this.size += written;
  }

  truncate() {
    this.access.truncate(0);
    this.size = 0;
  }

  close() {
    this.access.flush();
    this.access.close();
  }
}

/** Checks a complete file and gives it its name; one that is wrong is deleted. */
async function keep(models, name, sha256, digest) {
  const part = await models.getFileHandle(name + SUFFIX + PART);
  const file = await part.getFile();
  const begin = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  if (MAGIC.some((byte, i) => begin[i] !== byte)) {
    await remove(name);
    throw new StoreError("format", "The file is not a GGUF model. It was deleted.");
  }
  if (sha256) {
    const found = await digest(file);
    if (found !== sha256.toLowerCase()) {
      await remove(name);
      throw new StoreError("hash", `The file is not the right one, or was damaged on the way: its SHA-256 is ${found}, not ${sha256}. It was deleted.`);
    }
  }
  await models.removeEntry(name + SUFFIX + PART + ".json").catch(() => {});
  await part.move(name + SUFFIX);
}

/** Copies a file that the reader chose. */
export async function addFile(name, file, digest, progress) {
  await checkRoom(file.size);
  const models = await folder();
  const writer = await Writer.open(await models.getFileHandle(name + SUFFIX + PART, { create: true }));
  try {
    writer.truncate();
    for await (const piece of file.stream()) {
      writer.write(piece);
      progress(writer.size, file.size);
    }
  } finally {
    writer.close();
  }
  await keep(models, name, null, digest);
}

async function request(url, begin, signal) {
  let response;
  try {
    response = await fetch(url, { headers: begin ? { Range: `bytes=${begin}-` } : {}, signal, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new StoreError("address", `${url} was not reached. Check the address and the connection; its server has to allow other sites’ pages (CORS).`);
  }
  if (!response.ok && response.status !== 416) throw new StoreError("address", `${url} answered with HTTP status ${response.status}.`);
  return response;
}

/** What an earlier download of this file left behind, and which version of the file that was. */
async function recorded(models, name) {
  try {
    const handle = await models.getFileHandle(name + SUFFIX + PART + ".json");
    return JSON.parse(await (await handle.getFile()).text());
  } catch {
    return {};
  }
}

async function record(models, name, value) {
  const handle = await models.getFileHandle(name + SUFFIX + PART + ".json", { create: true });
  const access = await handle.createSyncAccessHandle();
  access.truncate(0);
  access.write(new TextEncoder().encode(JSON.stringify(value)));
  access.close();
}

/**
 * Downloads a model. One that was cut off goes on where it ended, if the server still has the same version or the hash is known.
 *
 * `digest(file)` resolves to its SHA-256 in hexadecimal digits; `progress(arrived, total)` gets bytes.
 */
export async function addAddress(name, { url, sha256, bytes }, digest, signal, progress) {
  const models = await folder();
  const handle = await models.getFileHandle(name + SUFFIX + PART, { create: true });
  const before = await recorded(models, name);
  const writer = await Writer.open(handle);
  try {
    const known = before.url === url && (sha256 || before.etag);
    if (!known) writer.truncate();
    let response = await request(url, writer.size, signal);
    const etag = response.headers.get("ETag");
    const begins = response.headers.get("Content-Range")?.match(/^bytes (\d+)-/)?.[1];
    if (writer.size && (response.status !== 206 || Number(begins ?? writer.size) !== writer.size || (!sha256 && etag !== before.etag))) {
      writer.truncate();
      if (response.status !== 200) {
        await response.body?.cancel();
        response = await request(url, 0, signal);
      }
    }
    const length = response.headers.has("Content-Encoding") ? NaN : Number(response.headers.get("Content-Length") ?? NaN);
    const total = bytes ?? (Number.isNaN(length) ? null : writer.size + length);
    if (total) await checkRoom(total - writer.size);
    await record(models, name, { url, etag });
    await receive(response, writer, total, progress);
  } finally {
    writer.close();
  }
  await keep(models, name, sha256, digest);
}

async function receive(response, writer, total, progress) {
  const cut = () => new StoreError("cut", `The download broke off after ${megabytes(writer.size)}${total ? ` of ${megabytes(total)}` : ""}. Start again: it goes on from there.`);
  const reader = response.body.getReader();
  for (;;) {
    let step;
    try {
      step = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw cut();
    }
    if (step.done) break;
    writer.write(step.value);
    progress(writer.size, total);
  }
  if (total && writer.size < total) throw cut();
}

/** The address, hash and size of what someone typed: an address, or ORG/NAME or ORG/NAME:FILE on the Hugging Face Hub. */
export async function locate(text, signal) {
  if (/^https?:\/\//.test(text)) return { name: nameOf(text), url: text };
  const [, repo, wanted] = text.match(/^([\w.-]+\/[\w.-]+)(?::(.+))?$/) ?? [];
  if (!repo) throw new StoreError("address", `“${text}” is neither an address nor ORG/NAME or ORG/NAME:FILE.`);
  const { siblings = [] } = await (await request(`${HUB}/api/models/${repo}?blobs=true`, 0, signal)).json();
  const models = siblings.filter(({ rfilename }) => rfilename.endsWith(SUFFIX));
  const fitting = wanted ? models.filter(({ rfilename }) => rfilename === wanted || rfilename === wanted + SUFFIX) : models;
  if (fitting.length !== 1) {
    const names = models.map(({ rfilename }) => `${repo}:${rfilename}`).join(", ");
    throw new StoreError("address", names ? `${repo} has several files. Write one of: ${names}.` : `${repo} has no GGUF file.`);
  }
  const [{ rfilename, size, lfs }] = fitting;
  return { name: nameOf(rfilename), url: `${HUB}/${repo}/resolve/main/${rfilename}`, sha256: lfs?.sha256, bytes: size };
}

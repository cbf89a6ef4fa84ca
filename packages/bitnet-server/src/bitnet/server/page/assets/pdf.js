// The text of a PDF. pdf.js reads it in a worker, which is ended when it takes too long.

import { getDocument, PDFWorker } from "./vendor/pdfjs/pdf.min.mjs";

const TIMEOUT = 60_000; // milliseconds for a whole file
const WORKER = new URL("vendor/pdfjs/pdf.worker.min.mjs", import.meta.url).href;
// The page's Content-Security-Policy allows this one policy, and the policy makes this one address.
const policy = globalThis.trustedTypes?.createPolicy("pdf-worker", { createScriptURL: () => WORKER });

/** The lines of a page: pieces of text with the line ends that pdf.js sees between them. */
async function textOfPage(page) {
  const { items } = await page.getTextContent();
  return items.map(({ str, hasEOL }) => str + (hasEOL ? "\n" : "")).join("").replaceAll("\0", "\uFFFD").trim(); // a glyph without a character
}

async function read(bytes, port) {
  let unmapped = false; // whether a font needs a table of characters that the page does not have
  class Tables {
    async fetch({ kind }) {
      unmapped ||= kind === "cMapUrl";
      throw new Error("The page has no files for fonts.");
    }
  }
  const worker = new PDFWorker({ port, verbosity: 0 });
  const task = getDocument({ data: bytes, worker, BinaryDataFactory: Tables, isEvalSupported: false, disableFontFace: true, useSystemFonts: false, useWasm: false, verbosity: 0 });
  const document = await task.promise;
  const pages = [];
  for (let number = 1; number <= document.numPages; number++) pages.push(await textOfPage(await document.getPage(number)));
  if (unmapped) throw new Error("has a font whose characters this page does not know. Save it as text.");
  return pages.filter(Boolean).join("\n\n");
}

/** What is wrong, to follow the file's name. */
function reason(error) {
  if (error.name === "PasswordException") return "is protected by a password.";
  if (error.name === "InvalidPDFException") return "is not a PDF that can be read.";
  return error.message;
}

/** The text of a PDF's pages, with an empty line between two. Throws an Error whose message goes on after the file's name. */
export async function textOfPdf(bytes) {
  const port = new Worker(policy ? policy.createScriptURL("") : WORKER, { type: "module" });
  let timer;
  const late = new Promise((resolve, reject) => {
    timer = setTimeout(() => reject(new Error(`could not be read within ${TIMEOUT / 1000} s.`)), TIMEOUT);
    port.onerror = () => reject(new Error("could not be read: the reader ended."));
  });
  try {
    return await Promise.race([read(bytes, port), late]);
  } catch (error) {
    throw new Error(reason(error));
  } finally {
    clearTimeout(timer);
    port.terminate();
  }
}

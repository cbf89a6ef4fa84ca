// What can be done with whole conversations: another name, a file, deletion that can be undone, and import.

import { announce, ask, button, confirm, download, h, undoable } from "./dom.js";
import * as drafts from "./drafts.js";
import * as store from "./store.js";
import { fileName, FormatError, parse, toJSON, toMarkdown } from "./transfer.js";

const LARGEST = 200_000_000; // bytes of a file that is read
const open = (id) => (location.hash = `#/chat/${id}`);

function exportFile(conversation, kind) {
  if (kind === "json") download(fileName(conversation.title, "json"), "application/json", toJSON([conversation]));
  else download(fileName(conversation.title, "md"), "text/markdown", toMarkdown(conversation));
}

export class Manager {
  /** `shown()` is the view of a conversation, if one is shown; `listed()` is called when the list of them has changed. */
  constructor({ shown, listed }) {
    Object.assign(this, { shown, listed });
  }

  /** The view of the conversation, if it is the one that is shown. */
  view(id) {
    const view = this.shown();
    return view?.conversation.id === id ? view : null;
  }

  /** The entries of a conversation's menu (`menu.js`). */
  menu(id) {
    const view = this.view(id);
    const disabled = Boolean(view && !store.begun(view.conversation));
    const found = async () => view?.conversation ?? (await store.load(id));
    return [
      ["edit", "Rename", async () => this.rename(await found())],
      ["download", "Save as Markdown", async () => exportFile(await found(), "md"), { disabled }],
      ["download", "Save as JSON", async () => exportFile(await found(), "json"), { disabled }],
      ["trash", "Delete", async () => this.remove(await found()), { class: "danger", disabled }],
    ];
  }

  rename(conversation) {
    ask("Rename the conversation", "Name of the conversation", conversation.title, async (name) => {
      const view = this.view(conversation.id);
      if (view) return view.rename(name);
      await store.save({ ...conversation, title: name, named: true });
      this.listed();
    });
  }

  /** Deletes a conversation, and offers to undo it. */
  async remove(conversation) {
    const view = this.view(conversation.id);
    await view?.discard();
    const draft = drafts.load(conversation);
    drafts.save(conversation, "");
    await store.remove(conversation.id);
    if (view) location.hash = "#/";
    this.listed();
    undoable(`“${conversation.title}” is deleted.`, async () => {
      await store.save(conversation);
      drafts.save(conversation, draft);
      announce("The conversation is back");
      this.listed();
      open(conversation.id);
    });
  }

  async removeAll() {
    if (!(await confirm("Delete all conversations?", "They are kept in this browser alone.", "Delete all"))) return;
    const all = await store.all();
    const written = drafts.all();
    await store.clear();
    drafts.clear();
    this.listed();
    undoable("All conversations are deleted.", async () => {
      await store.saveAll(all);
      drafts.restore(written);
      announce("The conversations are back");
      this.listed();
    });
  }

  /** Reads files of conversations; none of a file that cannot be read is kept. */
  async importFiles(files, say) {
    const read = [];
    for (const file of files) {
      try {
        if (file.size > LARGEST) throw new FormatError(`The file is larger than ${LARGEST / 1e6} MB.`);
        for (const one of parse(file.name, await file.text())) read.push(one);
      } catch (error) {
        if (!(error instanceof FormatError)) throw error;
        return say(`${file.name}: ${error.message} Nothing was imported.`);
      }
    }
    await store.saveAll(read);
    this.listed();
    say(`${read.length} ${read.length === 1 ? "conversation is" : "conversations are"} imported.`);
    if (read.length === 1) open(read[0].id);
  }

  /** The buttons for all conversations. */
  panel() {
    const result = h("p", { role: "status" });
    const say = (text) => (result.textContent = text);
    const picker = h("input", { type: "file", multiple: true, accept: ".json,.md,.markdown", "aria-label": "Files with conversations", hidden: true, onchange: async () => {
      await this.importFiles([...picker.files], say);
      picker.value = "";
    } });
    const save = async () => download("conversations.json", "application/json", toJSON(await store.all()));
    return h("div", {}, picker,
      h("div", { class: "row" },
        button("download", "Save all as JSON", save, { text: true }),
        button("upload", "Import files", () => picker.click(), { text: true }),
        button("trash", "Delete all conversations", () => this.removeAll(), { text: true, class: "danger" })),
      result);
  }
}

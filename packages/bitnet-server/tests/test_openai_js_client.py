"""The official ``openai`` client for JavaScript, over the demo model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE, NPM = shutil.which("node"), shutil.which("npm")
CLIENT = "openai@6.49.0"
QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]
SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const fields = { model: "demo", temperature: 0, messages: [{ role: "user", content: "What is 17 + 25?" }] };
const out = {};
out.chat = await client.chat.completions.create(fields);
out.pieces = [];
for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
  out.pieces.push(chunk.choices[0]?.delta?.content ?? "");
}
const schema = {
  type: "object",
  properties: { sum: { type: "integer", enum: [7, 8] } },
  required: ["sum"], additionalProperties: false,
};
out.structured = await client.chat.completions.create({
  ...fields, response_format: { type: "json_schema", json_schema: { name: "sum", strict: true, schema } },
});
out.response = await client.responses.create({ model: "demo", input: "What is 17 + 25?", temperature: 0 });
try {
  await client.chat.completions.create({ ...fields, model: "other" });
} catch (error) {
  out.error = { status: error.status, name: error.constructor.name };
}
console.log(JSON.stringify(out));
"""


@pytest.mark.nightly(unless_changed=("packages/bitnet-server",))
@pytest.mark.skipif(NODE is None or NPM is None, reason="no node with npm")
def test_the_javascript_client(demo: Any, tmp_path: Path) -> None:
    assert NODE is not None
    assert NPM is not None
    subprocess.run([NPM, "install", "--silent", CLIENT], cwd=tmp_path, check=True, timeout=120)
    (tmp_path / "client.mjs").write_text(SCRIPT, encoding="utf-8")
    command = [NODE, "client.mjs", f"{demo.url}/v1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    out = json.loads(ended.stdout)
    expected = demo.model.chat(QUESTION).text
    assert out["chat"]["choices"][0]["message"]["content"] == expected
    assert "".join(out["pieces"]) == expected
    assert sum(piece != "" for piece in out["pieces"]) > 1
    assert json.loads(out["structured"]["choices"][0]["message"]["content"])["sum"] in (7, 8)
    assert out["response"]["output_text"] == expected
    assert out["error"] == {"status": 404, "name": "NotFoundError"}

"""Tools of MCP servers in the page: off before one switches them on, and each call asks the user."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, Route, expect

from bitnet.server.commands.serve import serve as serve_command

PATHS = (
    "packages/bitnet-server/src/bitnet/server/page",
    "packages/bitnet-server/src/bitnet/server/api/page.py",
    "packages/bitnet-server/tests/page",
)
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Tools(http.server.BaseHTTPRequestHandler):
    """An MCP server of one tool; answers to calls come as events, all others as JSON."""

    calls: ClassVar[list[Any]] = []
    protocol_version = "HTTP/1.1"

    def do_OPTIONS(self) -> None:
        self.send_response(204)
        self.allow()
        self.end_headers()

    def allow(self) -> None:
        self.send_header("Access-Control-Allow-Origin", self.headers["Origin"])
        self.send_header("Access-Control-Allow-Headers", "Content-Type, Mcp-Session-Id, MCP-Protocol-Version")
        self.send_header("Access-Control-Expose-Headers", "Mcp-Session-Id")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "authorization" not in self.headers
        method = message["method"]
        if method != "initialize":
            assert self.headers["Mcp-Session-Id"] == "s-1"
            assert self.headers["MCP-Protocol-Version"] == "2025-06-18"
        result: Any = None
        if method == "initialize":
            result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}}
        elif method == "tools/list":
            first = {
                "tools": [{"name": "weather", "description": "Of a city", "inputSchema": SCHEMA}],
                "nextCursor": "2",
            }
            result = first if "cursor" not in message["params"] else {"tools": [{"name": "broken", "inputSchema": {}}]}
        elif method == "tools/call":
            Tools.calls.append(message["params"])
            failed = message["params"]["name"] == "broken"
            text = "it broke" if failed else "<b>sunny</b>"
            result = {"content": [{"type": "text", "text": text}], "isError": failed}
        body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result}).encode()
        if method == "tools/call":
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}})
            body = f"event: message\ndata: {note}\n\nevent: message\ndata: ".encode() + body + b"\n\n"
        self.send_response(202 if "id" not in message else 200)
        self.allow()
        self.send_header("Content-Type", "text/event-stream" if method == "tools/call" else "application/json")
        self.send_header("Mcp-Session-Id", "s-1")
        self.send_header("Content-Length", str(0 if "id" not in message else len(body)))
        self.end_headers()
        if "id" in message:
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def mcp() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tools) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], mcp: str) -> Iterator[str]:
    with serve("--mcp", mcp) as url:
        yield url


def script(talk: Any, route: Route, seen: list[Any], names: list[str]) -> None:
    """Calls the next of `names`, and answers with the result of the last."""
    body: Any = route.request.post_data_json
    seen.append(body)
    if len(seen) <= len(names):
        call = {"index": 0, "id": f"c{len(seen)}", "type": "function"}
        halves = [{"name": names[len(seen) - 1], "arguments": '{"city": '}, {"arguments": '"Paris"}'}]
        deltas = [{"tool_calls": [{**call, "function": half}]} for half in halves]
        chunks = [{"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        route.fulfill(content_type="text/event-stream", body=talk.sse(talk.says("Let me look. "), *chunks))
    else:
        talk.reply(route, f"It said: {body['messages'][-1]['content']}")


@pytest.fixture
def page(open_page: Callable[..., Page], mcp: str) -> Page:
    Tools.calls.clear()
    return open_page(expected=(mcp,))


def switch_on(page: Page, talk: Any, mcp: str) -> None:
    talk.menu(page, "Options")
    box = page.get_by_label(mcp)
    expect(box).not_to_be_checked()
    box.check()
    page.get_by_role("button", name="Done").click()


def test_tools_are_called_once_the_user_allows_it(page: Page, talk: Any, mcp: str) -> None:
    seen: list[Any] = []
    page.route(
        "**/v1/chat/completions", lambda route: script(talk, route, seen, ["weather", "broken", "weather", "gone"])
    )
    switch_on(page, talk, mcp)
    talk.ask(page, "How is the weather?")
    allow = page.get_by_role("button", name="Allow this call")
    expect(page.get_by_label("Arguments of weather")).to_contain_text('"city": "Paris"')
    expect(page.get_by_text(f"A tool of {mcp}")).to_be_visible()
    assert Tools.calls == []
    assert seen[0]["tools"][0]["function"] == {"name": "weather", "description": "Of a city", "parameters": SCHEMA}
    allow.click()
    expect(page.locator(".call")).to_have_count(2)
    expect(page.locator(".call").first).to_contain_text("Called")
    assert Tools.calls == [{"name": "weather", "arguments": {"city": "Paris"}}]
    allow.click()
    expect(page.locator(".call")).to_have_count(3)
    expect(page.locator(".call").nth(1)).to_contain_text("Failed")
    page.get_by_role("button", name="Refuse").click()
    expect(page.locator(".call")).to_have_count(4)
    expect(page.locator(".call").nth(2)).to_contain_text("Refused by you")
    assert len(Tools.calls) == 2
    allow.click()
    assert "There is no tool named gone." in talk.answered(page, 1)
    rounds = [message for message in seen[-1]["messages"] if message["role"] == "tool"]
    assert [one["content"] for one in rounds] == [
        "<b>sunny</b>",
        "it broke",
        "The user did not allow this call.",
        "There is no tool named gone.",
    ]
    page.reload()
    expect(page.locator(".call")).to_have_count(4)
    page.locator(".call summary").first.click()
    assert page.get_by_label("Result of weather").first.inner_text() == "<b>sunny</b>"
    talk.ask(page, "And now?")
    talk.answered(page, 2)
    assert [m["role"] for m in seen[-1]["messages"]] == ["user", *["assistant", "tool"] * 4, "assistant", "user"]
    (saved,) = talk.stored(page)
    copy = page.evaluate(
        """async (one) => {
            const { parse, toJSON } = await import("/assets/transfer.js");
            return parse("a.json", toJSON([one]))[0];
        }""",
        saved,
    )
    assert copy["messages"][1]["rounds"] == saved["messages"][1]["rounds"]
    assert "tools" not in copy, "a file switches no tools on"


def test_nothing_is_asked_of_tools_that_are_off(page: Page, talk: Any) -> None:
    seen: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: script(talk, route, seen, []))
    talk.ask(page, "How is the weather?")
    talk.answered(page)
    assert "tools" not in seen[0]


def test_an_answer_that_waits_for_the_user_can_be_stopped(page: Page, talk: Any, mcp: str) -> None:
    seen: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: script(talk, route, seen, ["weather"]))
    switch_on(page, talk, mcp)
    talk.ask(page, "How is the weather?")
    expect(page.get_by_role("button", name="Allow this call")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("button", name="Allow this call")).to_have_count(0)
    assert Tools.calls == []


def test_the_policy_names_those_servers_alone(page: Page, mcp: str) -> None:
    origin = mcp.removesuffix("/mcp")
    policy = page.evaluate("async () => (await fetch('')).headers.get('content-security-policy')")
    assert f"connect-src 'self' {origin};" in policy
    assert page.evaluate("async () => (await fetch('assets/mcp.json')).json()") == {"servers": [mcp]}


@pytest.mark.parametrize(
    "address",
    ["", "ftp://x/mcp", "x.org/mcp", "http://", "http://a b/", "http://x; script-src *", "http://u:p@x/", "http://x'/"],
)
def test_addresses_that_cannot_be_called_are_refused(address: str) -> None:
    """Each goes into a header as it is."""
    done = CliRunner().invoke(serve_command, ["--mcp", address])
    assert done.exit_code == 2
    assert "is no address such as" in done.output


def test_tools_need_the_page() -> None:
    done = CliRunner().invoke(serve_command, ["--mcp", "http://x/mcp", "--no-page"])
    assert done.exit_code == 2
    assert "--mcp is for the page" in done.output

"""Security: keys on every path, bodies of every kind, and requests of an attacker."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import pytest

from bitnet.core import Model
from bitnet.core.errors import InvalidInputError
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.api import devices
from bitnet.server.commands.serve import serve
from bitnet.server.http.app import access_log
from bitnet.server.http.routes import ENDPOINTS
from bitnet.server.models.settings import Settings

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture
def locked(demo_model: Model, running: Any) -> Any:
    with running(demo_model, api_keys=KEYS, max_body=100_000) as server:
        yield server


def test_every_path_asks_for_a_key(locked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", lambda: ([], []))  # which starts every driver there is
    public = {"/health", "/health/ready", "/health/live", "/", "/assets/{path:path}"}
    paths = [(e.path, method) for e in ENDPOINTS for method in e.methods] + [("/nothing", "GET"), ("/v1/x", "POST")]
    for path, method in paths:
        url = path.replace("{name:path}", "bitnet-demo").replace("{path:path}", "none.js")

        def status(headers: Any, method: str = method, url: str = url) -> int:
            return int(locked.client.request(method, url, headers=headers, content=b"{}").status_code)

        good = [{"Authorization": f"Bearer {KEYS[0]}"}, {"x-api-key": KEYS[1].encode()}]
        wrong = [{}, {"Authorization": "Bearer first-ke"}, {"Authorization": KEYS[0]}, {"x-api-key": ""}]
        wrong += [{"Authorization": "Basic " + KEYS[0]}, {"Authorization": f"Bearer {KEYS[0]}x"}]
        for headers in good:
            assert status(headers) not in (401, 403, 500), (path, headers)
        for headers in wrong:
            assert (status(headers) == 401) == (path not in public), (path, headers)


def test_a_refused_key_says_so_in_each_apis_shape(locked: Any) -> None:
    answer = locked.client.post("/v1/chat/completions", json={})
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
    assert locked.client.post("/api/chat", json={}).json() == {"error": "The API key is missing or wrong."}


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_opens_nothing(key: str, demo_model: Model, running: Any) -> None:
    with pytest.raises(InvalidInputError, match="key is empty"):
        Settings(api_keys=(KEYS[0], key))
    with pytest.raises(click.BadParameter, match="key is empty"):
        serve.make_context("serve", ["--api-key", key])
    with running(demo_model, api_keys=KEYS[:1]) as server:
        server.app.access.keys.append(hashlib.sha256(b"").digest())
        assert server.client.get("/v1/models", headers={"x-api-key": key.strip()}).status_code == 401


def test_bodies_that_are_too_large(locked: Any) -> None:
    headers = {"x-api-key": KEYS[0]}
    large = json.dumps({"prompt": "x" * 200_000}).encode()
    assert locked.client.post("/v1/completions", content=large, headers=headers).status_code == 413
    chunks = (large[i : i + 1000] for i in range(0, len(large), 1000))  # no length is told
    assert locked.client.post("/v1/completions", content=chunks, headers=headers).status_code == 413
    assert locked.client.post("/tokenize", content=large, headers=headers).status_code == 413


BAD = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"messages":' + b"[" * 40_000,
    b'{"messages": [{"role": "user", "content": NaN}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": 3}]}',
    b'{"messages": [[]]}',
    b'{"messages": {}}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"-1": 3}}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999999": 3}}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1%s": 3}}' % (b"0" * 5000),
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e30}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1%s}' % (b"0" * 400),
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1%s}' % (b"0" * 400),
    b'{"messages": [{"role": "user", "content": "x"}], "n": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_bad_bodies_are_the_clients_fault(demo: Any, body: bytes) -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"]
    if b'"content": "x"}], ' not in body:  # it counts a conversation's tokens, and samples nothing
        paths.append("/tokenize")
    for path in paths:
        answer = demo.client.post(path, content=body)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"], path
        assert "Traceback" not in answer.text


def test_compressed_bodies_are_refused(demo: Any) -> None:
    body = gzip.compress(b'{"content": "x"}')
    answer = demo.client.post("/tokenize", content=body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, "must not be compressed" in answer.json()["error"]["message"]) == (415, True)
    plain = demo.client.post("/tokenize", content=b'{"content": "x"}', headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_a_missing_model_is_named_as_its_api_names_it(demo: Any) -> None:
    for path in ("/api/show", "/api/chat", "/api/generate"):
        assert demo.client.post(path, json={}).json() == {"error": "model is missing."}, path


def test_a_number_with_too_many_digits_gets_no_advice_for_programs(demo: Any) -> None:
    answer = demo.client.post("/tokenize", content=b'{"content": %s}' % (b"1" * 5000))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("value has 5000 digits.")


def test_mutated_bodies_never_fail_the_server(demo: Any) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    base: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 1,
        "top_p": 0.9,
        "top_k": 5, "min_p": 0.1, "n": 1, "stop": ["a"], "logit_bias": {"5": 1}, "seed": 1, "logprobs": True,
        "top_logprobs": 2, "stream": False, "stream_options": {}, "prompt": "x", "input": "x", "system": "s",
        "options": {"num_predict": 2}, "presence_penalty": 0.1, "response_format": {"type": "text"},
    }  # fmt: skip
    odd: list[Any] = [
        None, True, -1, 0, 2**70, 10**400, 1e308, -0.5, "", "x", [], {}, [None], [[]], {"a": None}, [1, "a"], "\x00",
        ["a"] * 50,
    ]  # fmt: skip
    for _ in range(80):
        body = {**base, **{chance.choice([*base]): chance.choice(odd) for _ in range(chance.randrange(1, 3))}}
        path = chance.choice(["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"])
        answer = demo.client.post(path, content=json.dumps(body).encode())
        assert answer.status_code in (200, 400, 404, 429), (path, body, answer.text)


POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /props HTTP/1.1\r\nHost: x\r\n\r\n"


def raw(server: Any, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while more := connection.recv(65536):
            found += more
        return found


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}" + SMUGGLED,
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Bad\x00Name: y\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["length and chunks", "two lengths", "negative", "bad chunk", "nul in a name", "tls"],
)
def test_requests_that_could_be_smuggled_are_refused(demo: Any, head: bytes) -> None:
    answer = raw(demo, head)
    assert answer.startswith(b"HTTP/1.1 400") or not answer, answer
    assert b"chat_template" not in answer  # what /props says
    assert demo.client.get("/health").status_code == 200


def test_paths_lead_nowhere_else(demo: Any) -> None:
    for path in (
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/assets//etc/passwd",
        "/../app.py",
    ):
        answer = raw(demo, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404"), path
    for name in ("../../etc/passwd", "http://169.254.169.254/", "demo\x00", "/etc/passwd"):
        assert demo.chat(model=name).status_code == 404


def test_pages_of_other_sites_may_not_call(demo: Any, demo_model: Model, running: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

    def status(server: Any, **headers: str) -> int:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
        assert ("access-control-allow-origin" in answer.headers) == (server is not demo and "site" in str(headers))
        return int(answer.status_code)

    assert status(demo, origin="https://evil.example", sec_fetch_site="cross-site") == 403
    assert status(demo, origin="https://evil.example") == 403
    assert status(demo, origin=demo.url) == 200
    assert status(demo, origin="https://public.example", sec_fetch_site="same-origin") == 200
    assert demo.client.options("/v1/models", headers={"origin": "https://evil.example"}).status_code == 405
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}
    with running(demo_model, cors=("https://good.site",)) as server:
        assert status(server, origin="https://good.site", sec_fetch_site="cross-site") == 200
        origin = {"origin": "https://good.site"}
        preflight = server.client.options("/v1/chat/completions", headers={**origin, **asked})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://good.site")
        assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        other = server.client.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asked})
        assert (other.status_code, [name for name in other.headers if "allow-origin" in name]) == (200, [])
        shown = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=origin).headers
        assert shown["access-control-expose-headers"] == "retry-after, x-bitnet-device"
        assert shown["x-bitnet-device"]


HERE = {
    "http://localhost": True, "https://localhost:5173": True, "http://127.0.0.1:3000": True, "http://[::1]:3000": True,
    "https://evil.example": False, "http://notlocalhost": False, "http://localhost.evil.example": False,
    "http://127.0.0.1.evil.example": False, "localhost": True, "null": False, "file://": False,
    "app://localhost": False,
}  # fmt: skip


def test_pages_of_this_machine_may_be_allowed_at_any_port(demo_model: Model, running: Any) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with running(demo_model, cors=("localhost",)) as server:
        for origin, allowed in HERE.items():
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            for method, fields in (("OPTIONS", {}), ("POST", {"json": body})):
                answer = server.client.request(method, "/v1/completions", headers=headers, **fields)
                assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None), origin
                assert answer.status_code == (200 if allowed or method == "OPTIONS" else 403), origin


FROM = {
    "a program": ({}, True),
    "the address bar": ({"sec-fetch-site": "none"}, True),
    "the page": ({"sec-fetch-site": "same-origin"}, True),
    "the page, of an older browser": ({"origin": "{url}"}, True),
    "an image of another site": ({"sec-fetch-site": "cross-site"}, False),
    "an image of another port": ({"sec-fetch-site": "same-site"}, False),
    "a script of another site": ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, False),
    "a script of another site, of an older browser": ({"origin": "https://evil.example"}, False),
    "a frame without an origin": ({"origin": "null"}, False),
}


@pytest.mark.parametrize("sender", FROM)
def test_pages_of_other_sites_start_no_work(
    demo_model: Model, running: Any, monkeypatch: pytest.MonkeyPatch, sender: str
) -> None:
    """A GET that starts drivers or loads a model is refused before it does."""
    looks: list[int] = []

    def look() -> tuple[list[Any], dict[str, Any]]:
        looks.append(1)
        return [], {}

    monkeypatch.setattr(devices, "look", look)
    made, allowed = FROM[sender]
    with running(demo_model) as server:
        headers = {name: value.format(url=server.url) for name, value in made.items()}
        for path in ("/props", "/slots", "/devices"):
            assert server.client.get(path, headers=headers).status_code == (200 if allowed else 403), path
        assert server.client.get("/v1/models", headers=headers).status_code == 200
    assert len(looks) == allowed
    with running(demo_model, cors=("*",)) as server:
        assert server.client.get("/props", headers=headers).status_code == 200


NAMED = {
    "localhost": 200, "LOCALHOST:8080": 200, "localhost.": 200,
    "127.0.0.1:8080": 200, "127.9.9.9": 200, "[::1]:8080": 200,
    "evil.example": 403, "evil.example:8080": 403, "127.0.0.1.evil.example": 403, "localhost.evil.example": 403,
    "10.0.0.7": 403, "[fe80::1]": 403, "[::1": 403, "x@localhost@evil.example": 403,
}  # fmt: skip


def test_a_name_made_to_lead_here_is_refused(demo: Any, demo_model: Model, running: Any) -> None:
    """A page of that name would be of the server's own origin, to a browser (DNS rebinding)."""

    def status(server: Any, name: str, path: str = "/v1/models") -> int:
        return int(server.client.get(path, headers={"host": name}).status_code)

    assert status(demo, "evil.example") == 200  # hosted by another program, which may be reached by any name
    with running(demo_model, local=True) as server:
        assert {name: status(server, name) for name in NAMED} == NAMED
        assert raw(server, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
        refused = server.client.post("/api/chat", json=body, headers={"host": "evil.example"})
        assert refused.status_code == 403
        assert "answers only to localhost, not to 'evil.example'" in refused.json()["error"]
    with running(demo_model, local=True, api_keys=KEYS) as server:
        assert status(server, "evil.example") == 401
        assert status(server, "evil.example", "/health") == 200
    with running(demo_model, local=True, cors=("https://proxied.example",)) as server:
        assert (status(server, "proxied.example"), status(server, "evil.example")) == (200, 403)


def test_a_method_that_a_path_does_not_take(demo: Any) -> None:
    for path, allow in (
        ("/v1/responses/x", "DELETE, GET, HEAD"),
        ("/tokenize", "POST"),
        ("/v1/models", "GET, HEAD"),
    ):
        answer = demo.client.request("PATCH", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allow)


def test_an_unknown_path_names_the_nearest(demo: Any) -> None:
    known = [e.path for e in ENDPOINTS if "{" not in e.path and len(e.path) > 1]
    chance = random.Random()
    for path in known:
        at = chance.randrange(1, max(len(path) - 1, 2))  # not before a last s, with or without which it may be a path
        for wrong in ("/prefix" + path, path[:at] + "_" + path[at:], path + "x"):
            if wrong.startswith("/v1/responses/"):  # the rest is a response's id
                continue
            missing = demo.client.get(wrong)
            assert missing.status_code == 404
            assert f"no such path; {path} is the nearest." in missing.text, wrong
    assert "/v1/chat/completions is" in demo.client.post("/v2/chat/completions").text
    assert "/v1/chat/completions is" in demo.client.post("/v1/v1/chat/completions/").text
    begin = time.process_time()  # the server is in this process
    assert demo.client.get("/" + "x" * 60_000).json()["error"]["message"] == "There is no such path."
    assert time.process_time() - begin < 1


def test_no_prompt_is_logged(demo: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        access_log.setLevel(logging.INFO)
        demo.chat("my secret words", max_tokens=2)
        demo.chat("my secret words", top_p=7)
        demo.client.get("/v1/models?secret=1")
    assert len([r for r in caplog.records if r.name == access_log.name]) == 3
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("bitnet")]
    assert not any("secret" in line for line in ours)


BOMBS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ '{0:>{1[0]}}'.format('a', [9000000000]) | length }}",
)


@pytest.mark.parametrize("source", BOMBS, ids=["time", "memory"])
def test_a_template_bomb_is_bounded(script_model: Model, running: Any, scripted: Any, source: str) -> None:
    """It is refused within its time, with as many requests as may come, and the server answers meanwhile."""
    scripted(script_model, "fine")
    script_model._file.__dict__["chat_template"] = ChatTemplate(source)
    with running(script_model) as server, ThreadPoolExecutor(8) as pool:
        begin = time.monotonic()
        asked = [pool.submit(server.chat, str(i)) for i in range(8)]
        assert server.client.get("/health").status_code == 200
        answers = [answer.result() for answer in asked]
        assert [answer.status_code for answer in answers] == [400] * 8, answers[0].text
        assert "the chat template" in answers[0].json()["error"]["message"]
        assert time.monotonic() - begin < 30
        made = server.client.post("/v1/completions", json={"prompt": "x"})
        assert made.json()["choices"][0]["text"] == "fine"


def test_a_prompt_of_ten_megabytes_is_bounded(demo: Any) -> None:
    answer = demo.client.post("/v1/completions", json={"prompt": "many words " * 1_000_000, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "11,000,000 characters" in answer.json()["error"]["message"]
    longest = demo.service.longest_text
    assert demo.client.post("/tokenize", json={"content": "x" * (longest + 1)}).status_code == 400
    assert demo.client.post("/tokenize", json={"content": "x" * longest}).status_code == 200
    fits = demo.client.post("/v1/completions", json={"prompt": "many words " * 1000, "max_tokens": 1})
    assert "the context holds 1024" in fits.json()["error"]["message"]

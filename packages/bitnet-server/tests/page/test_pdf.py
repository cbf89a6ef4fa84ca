"""PDFs as attachments: their text, and what is said of those that have none."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

import bitnet.server

vendor_page: Any = pytest.importorskip("vendor_page", reason="node comes with the group clients")
PATHS = (
    "packages/bitnet-server/src/bitnet/server/page",
    "packages/bitnet-server/tests/page",
    "packages/bitnet-server/vendor",
    "tools/vendor_page.py",
)
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

WORDS = [
    "Größe",
    "naïve",
    "Straße",
    "модель",
    "данные",
    "λόγος",
    "words",
    "number",
    "(brackets)",
    "\\",
    "back",
    "%",
    "and",
    "&",
    "<",
    ">",
    "“quotes”",
    "½",
]


def pdf(
    content: bytes, font: bytes = b"/Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding", more: bytes = b""
) -> bytes:
    """A file of one page, written out by hand: `content` draws it, in a font called F."""
    packed = zlib.compress(content)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents 4 0 R "
        b"/Resources << /Font << /F 5 0 R >> >> >>",
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n" % len(packed) + packed + b"\nendstream",
        b"<< /Type /Font /Subtype " + font + b" >>",
    ]
    out, places = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n" % number + one + b"\nendobj\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer << /Size %d /Root 1 0 R " % (len(objects) + 1) + more + b">>"
    start = len(out)
    return (
        out
        + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
        + table
        + trailer
        + b"\nstartxref\n%d\n%%%%EOF" % start
    )


def shows(text: bytes) -> bytes:
    return b"BT /F 12 Tf 20 200 Td (" + text + b") Tj ET"


JAPANESE = (
    b"/Type0 /BaseFont /Ryumin-Light /Encoding /90ms-RKSJ-H /DescendantFonts [<< /Type /Font /Subtype /CIDFontType0 "
    b"/BaseFont /Ryumin-Light /CIDSystemInfo << /Registry (Adobe) /Ordering (Japan1) /Supplement 2 >> "
    b"/FontDescriptor << /Type /FontDescriptor /FontName /Ryumin-Light /Flags 4 >> >>]"
)
LOCK = (
    b"/ID [<00><00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <"
    + b"00" * 32
    + b"> /U <"
    + b"00" * 32
    + b"> >> "
)
REFUSED: dict[str, tuple[bytes, str]] = {
    "cut off": (b"%PDF-1.7\n", "is not a PDF that can be read"),
    "garbage": (b"%PDF-" + bytes(range(256)) * 9, "is not a PDF that can be read"),
    "a picture": (pdf(b"20 20 100 100 re f"), "has no text"),
    "a password": (pdf(shows(b"secret"), more=LOCK), "is protected by a password"),
    "characters of a table": (pdf(shows(b"\x93\xfa"), JAPANESE), "has a font whose characters this page does not know"),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, installed: Callable[[str, Any], None]) -> Path:
    """A folder with npm's pdf.js, of the version that packages are built with."""
    folder = tmp_path_factory.mktemp("npm")
    installed("node", vendor_page.install(folder))
    return folder


@pytest.fixture
def page(open_page: Callable[..., Page], reader: Path) -> Page:
    """The page of a server that was built with a reader of PDFs."""
    page = open_page()
    files = {Path(name).name: reader / "node_modules" / name for name in vendor_page.COPIED["pdfjs"]}
    page.route(
        "**/assets/vendor/pdfjs/*",
        lambda route: route.fulfill(
            content_type="text/javascript", body=files[route.request.url.rpartition("/")[2]].read_text("utf-8")
        ),
    )
    return page


def attach(page: Page, name: str, content: bytes) -> None:
    page.get_by_label("Files to attach").set_input_files(
        {"name": name, "mimeType": "application/pdf", "buffer": content}
    )


def text_of(page: Page, name: str) -> str:
    page.get_by_role("button", name=name).first.click()
    text = page.get_by_label(f"Text of {name}").text_content()
    page.keyboard.press("Escape")
    return text or ""


def test_the_words_of_a_printed_page_go_along(browser: Browser, page: Page, talk: Any) -> None:
    """Chromium prints random words of many scripts on several pages; they come back in their order."""
    seed = random.randrange(2**32)
    print("seed", seed)
    words = random.Random(seed).choices(WORDS, k=300)
    with browser.new_page() as sheet:
        sheet.evaluate("(text) => document.body.append(text)", " ".join(words))
        content = sheet.pdf(width="300px", height="200px")
    sent: list[Any] = []

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json)
        talk.reply(route, "Yes")

    page.route("**/v1/chat/completions", answer)
    attach(page, "printed.pdf", content)
    expect(page.get_by_role("list", name="Attached files")).to_contain_text("tokens")
    text = text_of(page, "printed.pdf")
    assert text.split() == words
    assert text.count("\n\n") >= 2, "pages are apart"
    talk.ask(page, "What is it?")
    talk.answered(page)
    assert text in sent[0]["messages"][0]["content"]


def test_a_page_of_a_standard_font(page: Page) -> None:
    content = shows(b"First \\(one\\)") + b" BT /F 12 Tf 20 180 Td (Gr\\366\\337e) Tj ET"
    attach(page, "a.pdf", pdf(content))
    expect(page.get_by_role("list", name="Attached files")).to_be_visible()
    assert text_of(page, "a.pdf") == "First (one)\nGröße"


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_text_says_why(page: Page, name: str) -> None:
    content, why = REFUSED[name]
    attach(page, "<b>.pdf", content)
    expect(page.get_by_role("alert")).to_contain_text(f"<b>.pdf {why}")
    expect(page.get_by_role("list", name="Attached files")).to_have_count(0)


def test_damaged_files_are_read_or_refused(page: Page) -> None:
    """Bytes of a good file change at random: each time there is a text or a reason, and the page goes on."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    good = pdf(shows(b"words"))
    damaged = []
    for _ in range(20):
        content = bytearray(good)
        for _ in range(chance.randint(1, 40)):
            content[chance.randrange(5, len(content))] = chance.randrange(256)
        damaged.append([*content[: chance.randint(6, len(content))]])
    said = page.evaluate(
        """async (all) => {
            const { textOf } = await import("/assets/attachments.js");
            const read = (bytes) => textOf(new File([new Uint8Array(bytes)], "a.pdf"));
            return Promise.all(all.map((bytes) => read(bytes).catch((error) => `${error.name} ${error.message}`)));
        }""",
        damaged,
    )
    assert all(one.startswith("Error a.pdf ") or "words" in one or one.strip() for one in said), said
    assert not [one for one in said if "TypeError" in one], said


def test_a_file_that_takes_too_long_is_given_up(page: Page) -> None:
    page.clock.install()
    page.route("**/pdf.worker.min.mjs", lambda route: route.fulfill(content_type="text/javascript", body="for (;;);"))
    attach(page, "a.pdf", pdf(shows(b"words")))
    page.wait_for_timeout(500)
    page.clock.fast_forward(61_000)
    expect(page.get_by_role("alert")).to_contain_text("a.pdf could not be read within 60 s")


def test_a_server_from_a_checkout_says_that_it_has_no_reader(open_page: Callable[..., Page]) -> None:
    page = open_page(expected=("404",))
    page.route("**/assets/vendor/pdfjs/*", lambda route: route.fulfill(status=404))
    attach(page, "a.pdf", pdf(shows(b"words")))
    expect(page.get_by_role("alert")).to_contain_text("a.pdf could not be read: this server has no reader of PDFs")


def test_the_copies_are_those_that_the_page_loads(reader: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(vendor_page, "ASSETS", tmp_path)
    vendor_page.copy(reader)
    copies = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    script = (Path(bitnet.server.__file__).parent / "page" / "assets" / "pdf.js").read_text(encoding="utf-8")
    assert copies == {*re.findall(r"vendor/(pdfjs/[\w.]+)", script), "pdfjs/LICENSE"}

# Markdown stands beside its HTML, one case a line.
# ruff: noqa: E501
"""The page's Markdown: what models write is shown as meant, and what an attacker writes does nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

SECONDS = 1.5
"""A hostile text of LONG characters may take longer only if a quarter of it takes an eighth at least: its time does not
grow with the square of its length."""
LONG = 60_000
ALLOWED = {
    *(
        "a",
        "blockquote",
        "br",
        "button",
        "code",
        "del",
        "div",
        "em",
        "figcaption",
        "figure",
        "h3",
        "h4",
        "h5",
        "h6",
        "hr",
    ),
    *("math", "mfrac", "mi", "mn", "mo", "mover", "mroot", "mrow", "mspace", "msqrt", "msub", "msubsup", "msup"),
    *("mtable", "mtd", "mtext", "mtr", "munder", "munderover"),
    *("li", "ol", "p", "pre", "span", "strong", "svg", "table", "tbody", "td", "th", "thead", "tr", "ul", "use"),
}


@pytest.fixture(scope="module")
def shared(browser: Browser, server: str, watch: Callable[[Page], Any]) -> Iterator[tuple[Page, Any]]:
    """One page for all of this file: nothing that is rendered may leave a trace."""
    with browser.new_page() as page:
        trouble = watch(page)
        page.goto(server)
        yield page, trouble


@pytest.fixture
def page(shared: tuple[Page, Any]) -> Iterator[Page]:
    page, trouble = shared
    yield page
    assert not trouble.said
    assert not trouble.left


@pytest.fixture
def render(page: Page) -> Callable[[str], str]:
    """Markdown → the HTML of what is shown, buttons left out."""

    def show(text: str) -> str:
        html: str = page.evaluate(
            """async (text) => {
                const { markdown } = await import("/assets/markdown.js");
                const element = markdown(text);
                element.querySelectorAll("button").forEach((button) => button.remove());
                return element.innerHTML;
            }""",
            text,
        )
        return html

    return show


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        (
            "**b** *i* ***bi*** ~~d~~ `c`",
            "<p><strong>b</strong> <em>i</em> <strong><em>bi</em></strong> <del>d</del> <code>c</code></p>",
        ),
        ("a **b *c* d** e", "<p>a <strong>b <em>c</em> d</strong> e</p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("`` a`b `` and `<b>`", "<p><code>a`b</code> and <code>&lt;b&gt;</code></p>"),
        ("**open and *open", "<p>**open and *open</p>"),
        ("\\*not\\* \\<b>", "<p>*not* &lt;b&gt;</p>"),
        ("# One\n## Two ##\n#no", "<h3>One</h3><h4>Two</h4><p>#no</p>"),
        ("- a\n- b\n  - c\n\nend", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("1. a\n\n   more\n2. b", '<ol start="1"><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>'),
        ("> q\n> - x\n\nend", "<blockquote><p>q</p><ul><li>x</li></ul></blockquote><p>end</p>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("line  \nbreak<br>here", "<p>line  <br>break<br>here</p>"),
        ("<b>bold</b> & co", "<p>&lt;b&gt;bold&lt;/b&gt; &amp; co</p>"),
        (
            "~~~\na\n```\n~~~",
            '<figure class="code"><figcaption><span>text</span></figcaption><pre tabindex="0" role="group" aria-label="Code, text"><code>a\n```</code></pre></figure>',
        ),
    ],
)
def test_what_models_write(render: Callable[[str], str], text: str, html: str) -> None:
    assert render(text) == html


def test_a_table(render: Callable[[str], str]) -> None:
    html = render("| a | b |\n|:--|--:|\n| 1 | `x\\|y` |\n| 2 |\n\nend")
    assert '<th scope="col">a</th><th class="right" scope="col">b</th>' in html
    assert (
        '<tr><td>1</td><td class="right"><code>x|y</code></td></tr><tr><td>2</td><td class="right"></td></tr>' in html
    )
    assert html.endswith("<p>end</p>")


def test_code_keeps_every_character(page: Page) -> None:
    code = 'def f(x):  # <b>\n\tif x > 1:\n        return "a\'\\" */ //"\n\n```not the end'
    shown = page.evaluate(
        """async (text) => (await import("/assets/markdown.js")).markdown(text).querySelector("pre").textContent""",
        f"````python\n{code}\n````",
    )
    assert shown == code.replace("\t", "    ")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[a](https://x.org/p_(q)?a=1&b=2)", "https://x.org/p_(q)?a=1&b=2"),
        ('[a](https://x.org "title")', "https://x.org/"),
        ("<https://x.org>", "https://x.org/"),
        ("see https://x.org/a_b_c.", "https://x.org/a_b_c"),
        ("[a](mailto:a@x.org)", "mailto:a@x.org"),
        ("![alt](https://x.org/i.png)", "https://x.org/i.png"),
        ("[a](javascript:alert(1))", None),
        ("[a](JaVaScRiPt:alert(1))", None),
        ("[a](java\tscript:alert(1))", None),
        ("[a](\x01javascript:alert(1))", None),
        ("[a](data:text/html,<script>alert(1)</script>)", None),
        ("[a](vbscript:x)", None),
        ("[a](blob:https://x.org/1)", None),
        ("[a](/v1/models)", None),
        ("[a](//evil.org)", None),
        ("<javascript:alert(1)>", None),
        ("![x](javascript:alert(1))", None),
    ],
)
def test_links_lead_to_the_web_or_to_mail_alone(page: Page, text: str, address: str | None) -> None:
    links = page.evaluate(
        """async (text) => [...(await import("/assets/markdown.js")).markdown(text).querySelectorAll("a")]
            .map((a) => ({ href: a.href, rel: a.rel, target: a.target }))""",
        text,
    )
    if address is None:
        assert links == []
    else:
        assert links == [{"href": address, "rel": "noopener noreferrer nofollow", "target": "_blank"}]


HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "```<img src=x onerror=window.hit=1>\n<script>window.hit=1</script>\n```",
    '[<img src=x onerror=window.hit=1>](https://x.org/"onmouseover="window.hit=1)',
    "| <script>window.hit=1</script> |\n|---|\n| <img src=x onerror=window.hit=1> |",
    "![](https://evil.example/steal.png)",
    "<style>*{display:none}</style><link rel=stylesheet href=//evil.example>",
    "</code></pre><script>window.hit=1</script>",
    "$\\text{<img src=x onerror=window.hit=1>}$ $$\\operatorname{<script>window.hit=1</script>}$$",
    "$\\href{javascript:window.hit=1}{x}$ $\\begin{<svg onload=window.hit=1>}x\\end{<svg onload=window.hit=1>}$",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_html_of_a_model_is_text(page: Page, text: str) -> None:
    found = page.evaluate(
        """async (text) => {
            const { markdown } = await import("/assets/markdown.js");
            const element = markdown(text);
            document.querySelector("main").append(element);
            await new Promise((resolve) => setTimeout(resolve, 100));
            const all = [...element.querySelectorAll("*")];
            return {
                hit: window.hit ?? null,
                tags: [...new Set(all.map((one) => one.tagName.toLowerCase()))],
                handlers: all.flatMap((one) => one.getAttributeNames()).filter((name) => /^on|^style$|^src/.test(name)),
            };
        }""",
        text,
    )
    assert found["hit"] is None
    assert set(found["tags"]) <= ALLOWED
    assert found["handlers"] == []


PAYLOADS = [
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1>",
    "<svg><script href=data:text/javascript,window.hit=1 />",
    "<math><mtext><script>window.hit=1</script></mtext></math>",
    "<iframe src=javascript:parent.hit=1>",
    "<object data=javascript:window.hit=1>",
    "<details open ontoggle=window.hit=1>",
    "<input autofocus onfocus=window.hit=1>",
    "<style>@import '//evil.example/x.css'</style>",
    "<a href=javascript:window.hit=1 autofocus onfocus=window.hit=1>x</a>",
    "<form action=//evil.example><button>x</button></form>",
    "<base href=//evil.example><img src=x>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "&lt;img src=x onerror=window.hit=1&gt;",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=1>'>",
    "javascript:window.hit=1",
    "data:text/html,<script>window.hit=1</script>",
    '" onmouseover=window.hit=1 x="',
]
CARRIERS = [
    "{}",
    "# {}",
    "- {}\n  - {}",
    "> {}",
    "**{}** *{}*",
    "`{}`",
    "```{}\n{}\n```",
    "[{}](https://x.org)",
    "[x]({})",
    "[x](<{}>)",
    "![{}]({})",
    "| {} |\n|---|\n| {} |",
    "$\\text{{}}$",
    "$${}$$",
    "<{}>",
]
"""Where a payload may stand: 19 of them in 15 places are 285 texts."""


def test_hostile_texts_run_nothing(page: Page) -> None:
    """None is run, loads anything or leaves an element that Markdown does not have, whole or as it grows."""
    texts = [carrier.replace("{}", payload) for payload in PAYLOADS for carrier in CARRIERS]
    assert len(set(texts)) == 285
    before = page.evaluate("document.querySelectorAll('*').length")
    found = page.evaluate(
        """async (texts) => {
            const { Growing, markdown } = await import("/assets/markdown.js");
            const place = document.createElement("div");
            document.querySelector("main").append(place);
            const shown = texts.map((text) => {
                const grown = document.createElement("div");
                const growing = new Growing(grown);
                const whole = markdown(text);
                place.append(whole, grown);
                for (let end = 0; end <= text.length; end += 7) growing.show(text.slice(0, end));
                growing.show(text, true);
                const all = [...whole.querySelectorAll("*"), ...grown.querySelectorAll("*")];
                return [
                    [...new Set(all.map((one) => one.tagName.toLowerCase()))],
                    all.flatMap((one) => one.getAttributeNames()).filter((name) => /^on|^style$|^src|^action|^data$/.test(name)),
                    all.map((one) => one.getAttribute("href")).filter((to) => to !== null && !/^(https?:|mailto:|#)/.test(to)),
                ];
            });
            for (const one of place.querySelectorAll("*")) one.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
            await new Promise((resolve) => setTimeout(resolve, 300));
            place.remove();
            return { hit: window.hit ?? null, shown };
        }""",
        texts,
    )
    assert found["hit"] is None
    for text, (tags, handlers, links) in zip(texts, found["shown"], strict=True):
        assert set(tags) <= ALLOWED, text
        assert handlers == [], text
        assert links == [], text
    assert page.evaluate("document.querySelectorAll('*').length") == before


BOMBS = [
    "*", "_", "**a ", "a** ", "*a _b ", "~~", "`", "``a`", "[", "![", "](", "[](", "[a](", "[a](b \"", "(", "<", "<http://", "\\",
    "> ", "- ", "1. ", "  - a\n", "> > > a\n", "- a\n\n\n\n", "|", "| a ", "|-", "#", "# ", "`" * 3 + "\n", "~~~", "http://a", "\n", " ", "- - ", "* * ",
    "a\n\n", "[a](https://x.org/(", "h", "$", "$$", "$a", "$$a\n", "\\(", "\\[", "\\[\n", "$a$", "$$\n", "$\\frac$", "${$",
]  # fmt: skip


def test_no_text_makes_it_slow(page: Page) -> None:
    bombs = [(unit * (LONG // len(unit) + 1))[:LONG] for unit in BOMBS]
    bombs += [
        left * (LONG // 2 // len(left)) + right * (LONG // 2 // len(right))
        for left, right in (("**a", "b**"), ("[", "](x)"), ("*a ", " _b"), ("`", "``"), ("_a ", "b* "))
    ]
    bombs += [
        "# " + " " * LONG + "x",
        "~" * LONG + "`",
        "[a](" + " " * LONG,
        "- a\n" + "\n" * LONG + "b",
        "|" + "-" * LONG + "x\n|" + "-" * LONG,
    ]
    times = page.evaluate(
        """async ([bombs, limit]) => {
            const { markdown } = await import("/assets/markdown.js");
            return bombs.map((text) => {
                const time = (part) => {
                    const begin = performance.now();
                    markdown(part);
                    return performance.now() - begin;
                };
                let whole = Infinity; // the least of up to three tries, as other work only slows one down
                for (let tries = 0; tries < 3 && whole > limit; tries++) whole = Math.min(whole, time(text));
                return whole > limit && whole > 8 * time(text.slice(0, text.length / 4)) ? whole : 0;
            });
        }""",
        [bombs, SECONDS * 1000],
    )
    slow = {bomb[:12]: time for bomb, time in zip(bombs, times, strict=True) if time}
    assert not slow, slow


def test_random_text_is_safe_and_grows_as_it_is_shown_whole(page: Page) -> None:
    """Streaming shows at its end what showing the whole text at once does."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    parts = [
        "*",
        "**",
        "_",
        "`",
        "```\n",
        "\n",
        "\n\n",
        "- ",
        "1. ",
        "> ",
        "# ",
        "| a | b |\n|---|---|\n",
        "[x](",
        "https://x.org",
        ")",
        "](",
        "word ",
        "  ",
        "<b>",
        "\\",
        "~~",
        "![",
        "~~~py\n",
        "$",
        "$$",
        "\\[",
        "\\]",
        "x^2_{",
        "}",
    ]
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 60))) for _ in range(300)]
    results = page.evaluate(
        """async (texts) => {
            const { Growing, markdown } = await import("/assets/markdown.js");
            return texts.map((text) => {
                const whole = markdown(text);
                const element = document.createElement("div");
                const growing = new Growing(element);
                for (let end = 0; end <= text.length; end += 5) growing.show(text.slice(0, end));
                growing.show(text, true);
                const plain = (node) => node.innerHTML.replace(/ (id|title)="[^"]*"/g, "");
                const bad = [...whole.querySelectorAll("*")].filter((one) => one.getAttributeNames().some((name) => /^on|^style$|^src/.test(name)));
                return { same: plain(whole) === plain(element), tags: [...whole.querySelectorAll("*")].map((one) => one.tagName.toLowerCase()), bad: bad.length };
            });
        }""",
        texts,
    )
    for text, result in zip(texts, results, strict=True):
        assert result["same"], (seed, text)
        assert set(result["tags"]) <= ALLOWED, (seed, text)
        assert not result["bad"], (seed, text)

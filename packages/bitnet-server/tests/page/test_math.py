"""Formulas: shown as MathML, and as written where they are not understood."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)


@pytest.fixture(scope="module")
def page(browser: Browser, server: str, watch: Callable[[Page], Any]) -> Iterator[Page]:
    """One page for all of this file."""
    with browser.new_page() as page:
        trouble = watch(page)
        page.goto(server)
        yield page
        assert not trouble.said
        assert not trouble.left


def show(page: Page, *texts: str) -> list[str]:
    """Markdown → HTML, attributes of MathML's elements left out."""
    shown: list[str] = page.evaluate(
        "async (texts) => { const { markdown } = await import('/assets/markdown.js');"
        "return texts.map((text) => markdown(text).innerHTML); }",
        list(texts),
    )
    return [re.sub(r"<(m\w+) [^>]*>", r"<\1>", html) for html in shown]


FORMULAS = {
    "x^2": "<msup><mi>x</mi><mn>2</mn></msup>",
    "a_1 + b": "<msub><mi>a</mi><mn>1</mn></msub><mo>+</mo><mi>b</mi>",
    "x_i^{n-1}": "<msubsup><mi>x</mi><mi>i</mi><mrow><mi>n</mi><mo>−</mo><mn>1</mn></mrow></msubsup>",
    r"\frac{1}{2}": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"x^12": "<msup><mi>x</mi><mn>1</mn></msup><mn>2</mn>",
    r"\sqrt{x}": "<msqrt><mi>x</mi></msqrt>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"\alpha \le \beta": "<mi>α</mi><mo>≤</mo><mi>β</mi>",
    r"f'(x)": "<msup><mi>f</mi><mo>′</mo></msup><mo>(</mo><mi>x</mi><mo>)</mo>",
    r"\mathbb{R}^n": "<msup><mi>ℝ</mi><mi>n</mi></msup>",
    r"\mathbf{A}": "<mi>𝐀</mi>",
    r"\text{if } x": "<mtext>if&nbsp;</mtext><mi>x</mi>",
    r"\sin x": "<mrow><mi>sin</mi><mspace></mspace></mrow><mi>x</mi>",
    r"\left( x \right)": "<mrow><mo>(</mo><mi>x</mi><mo>)</mo></mrow>",
    r"\hat{y}": "<mover><mi>y</mi><mo>^</mo></mover>",
    r"\binom{n}{k}": "<mrow><mo>(</mo><mfrac><mi>n</mi><mi>k</mi></mfrac><mo>)</mo></mrow>",
    r"\{1, 2\}": "<mo>{</mo><mn>1</mn><mo>,</mo><mn>2</mn><mo>}</mo>",
    r"\unknown{x}": None,
    r"\frac{1}": None,
    r"{x": None,
    r"\begin{pmatrix} a \end{matrix}": None,
    "x__2": None,
    "{" * 60 + "x" + "}" * 60: None,
}


def test_formulas(page: Page) -> None:
    shown = show(page, *(f"${text}$" for text in FORMULAS))
    for (text, wanted), html in zip(FORMULAS.items(), shown, strict=True):
        if wanted is None:
            assert html == f'<p><code class="tex">${text}$</code></p>', text
        else:
            assert html == f"<p><math>{wanted}</math></p>", text


def test_formulas_that_stand_alone(page: Page) -> None:
    total = "<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi>"
    beside = total.replace("munderover", "msubsup")
    text = r"\sum_{i=1}^n i"
    shown = show(
        page, f"$${text}$$", f"$$\n{text}\n$$", f"\\[\n{text}\n\\]", f"a $${text}$$ b", f"so ${text}$", f"\\({text}\\)"
    )
    assert shown[:3] == [f"<math>{total}</math>"] * 3
    assert shown[3] == f"<p>a <math>{total}</math> b</p>"
    assert shown[4:] == [f"<p>so <math>{beside}</math></p>", f"<p><math>{beside}</math></p>"]
    (html,) = show(page, "$$\n\\begin{cases} 1 & x > 0 \\\\\n- 1 & \\text{else} \\end{cases}\n$$\n\nend")
    assert html.startswith("<math><mrow><mo>{</mo><mtable><mtr><mtd><mn>1</mn></mtd>")
    assert html.endswith("</mtable></mrow></math><p>end</p>")
    (html,) = show(page, "$$\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}$$")
    assert html.count("<mtr>") == 2
    assert html.count("<mtd>") == 4


@pytest.mark.parametrize(
    "text",
    ["It costs $5 and $10.", "$5-$10", "a $ b $ c", "US$ and C$", "\\$x\\$", "`$x$`", "$$ open\n\nand more", "\\(open"],
)
def test_dollars_are_no_formulas(page: Page, text: str) -> None:
    (html,) = show(page, text)
    assert "<math" not in html
    assert 'class="tex"' not in html


PARTS = [
    *(
        "x",
        "1",
        "+",
        " ",
        "^",
        "_",
        "{",
        "}",
        "&",
        "\\\\",
        "'",
        "~",
        "<b>",
        "(",
        "|",
        "\\frac",
        "\\sqrt",
        "[",
        "]",
        "\\left(",
    ),
    *(
        "\\right)",
        "\\text{",
        "\\alpha",
        "\\sum",
        "\\lim",
        "\\mathbb{R}",
        "\\hat",
        "\\begin{matrix}",
        "\\end{matrix}",
        "\\not",
    ),
]


def test_random_formulas_are_shown_or_left_as_written(page: Page) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    texts = ["".join(draw.choices(PARTS, k=draw.randrange(1, 12))) for _ in range(600)]
    shown = page.evaluate(
        """async (texts) => {
            const { math } = await import("/assets/math.js");
            return texts.map((text) => {
                const element = math(text, text.length % 2 === 0);
                if (!element) return null;
                document.querySelector("main").append(element);
                const tags = [element, ...element.querySelectorAll("*")].map((one) => one.namespaceURI);
                element.remove();
                return [element.textContent, [...new Set(tags)]];
            });
        }""",
        texts,
    )
    understood = 0
    for text, one in zip(texts, shown, strict=True):
        if one is None:
            continue
        understood += 1
        assert one[1] == ["http://www.w3.org/1998/Math/MathML"], (seed, text)
        commands = re.sub(r"\\[a-z]+(\{[a-zA-Z]+\})?", "", text)
        for sign in "x1+":
            assert one[0].count(sign) >= commands.count(sign), (seed, text, one[0])
    assert understood > 60, (seed, understood)

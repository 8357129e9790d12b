"""Tests of the completions page in Chromium: layout on a phone, and contrast in both schemes."""

import pytest

from grpo_fast.train.report.page import CompletionsPage
from tests import chromium

pytestmark = pytest.mark.skipif(not chromium.COMMAND, reason="Chromium is not installed")

# This JavaScript returns the lowest contrast ratio (WCAG 2.2, 1.4.3) between a text of the page and
# its background, and the HTML of this text. Transparent backgrounds are blended.
CONTRAST = """(() => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return {rgb: [r, g, b], a};
  };
  const behind = node => {
    if (!node) return Array(3).fill(matchMedia('(prefers-color-scheme: dark)').matches ? 0 : 255);
    const own = parse(getComputedStyle(node).backgroundColor);
    if (own.a === 1) return own.rgb;
    return behind(node.parentElement).map((c, i) => own.a * own.rgb[i] + (1 - own.a) * c);
  };
  const light = rgb => {
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map(c => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let least = [Infinity, ''];
  for (const node of document.body.querySelectorAll('*')) {
    if (![...node.childNodes].some(c => c.nodeType === 3 && c.data.trim())) continue;
    const [dark, bright] = [light(parse(getComputedStyle(node).color).rgb), light(behind(node))]
      .sort((a, b) => a - b);
    const found = (bright + 0.05) / (dark + 0.05);
    if (found < least[0]) least = [found, node.outerHTML.slice(0, 120)];
  }
  return least;
})()"""


def row(number, reward, correct):
    """Return a completion in the format of `rows_of`.

    The page colors tokens by logp and advantage. The tokens of the completion have all colors.
    """
    n = 40
    return {
        "group": 0, "prompt": "question " * 30, "answer": "18", "reward": reward,
        "rewards/gsm8k_correct": reward, "advantage": reward - 0.5, "extracted": "18",
        "extracted_lenient": "18", "correct": correct, "truncated": True, "completion": "x",
        "tokens": [" word", "x" * 200, *[" t"] * (n - 2)], "logps": [-i / 8 for i in range(n)],
        "advantages": [(i - n / 2) / n for i in range(n)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page = CompletionsPage(folder / "completions.html", "a-run-of-mine")
    for step in range(40):
        page.add(step, [row(0, 1.0, True), row(1, 0.0, False), row(2, 0.2, None)])
    with chromium.browser(folder / "profile") as browser:
        yield browser, page.path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("shade", ["by-logp", "by-advantage"])
def test_it_fits_and_can_be_read(seen, width, scheme, shade):
    browser, path = seen
    browser.open(path, width, scheme)
    assert browser.call("Page.getLayoutMetrics")["cssContentSize"]["width"] == width
    browser.evaluate(f"document.getElementById('{shade}').checked = true")
    least, where = browser.evaluate(CONTRAST)
    assert least >= 4.5, where
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 29)"
    assert dark == (scheme == "dark")

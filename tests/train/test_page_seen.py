"""Tests of the completions page in Chromium: layout on a phone, and contrast in both schemes."""

import pytest

from grpo_fast.train.report.page import write_page, write_parquet
from tests import chromium

pytestmark = pytest.mark.skipif(not chromium.COMMAND, reason="Chromium is not installed")

# JavaScript that finds the text with the lowest contrast ratio to its background (WCAG 2.2, 1.4.3)
# in both color modes of the tokens. It returns this ratio and the HTML of the text. A transparent
# background is blended with the background of the parent element.
CONTRAST = """page => {
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
  const rows = [];
  for (const shade of ['by-logp', 'by-advantage']) {
    page.getElementById(shade).checked = true;
    for (const node of page.body.querySelectorAll('*')) {
      if (![...node.childNodes].some(c => c.nodeType === 3 && c.data.trim())) continue;
      const [dark, bright] = [light(parse(getComputedStyle(node).color).rgb), light(behind(node))]
        .sort((a, b) => a - b);
      rows.push([(bright + 0.05) / (dark + 0.05), node.outerHTML.slice(0, 120)]);
    }
  }
  return rows.reduce((least, row) => row[0] < least[0] ? row : least);
}"""


def row(number, reward, correct):
    """Return a completion in the format of `rows_of`.

    The page colors tokens by logp and advantage. The tokens of this completion cover all colors.
    """
    n = 40
    return {
        "group": 0, "prompt": "question " * 30, "answer": "18", "reward": reward,
        "rewards/gsm8k_correct": reward, "advantage": reward - 0.5, "extracted": "18",
        "extracted_lenient": "18", "correct": correct, "truncated": True, "completion": "x",
        "tokens": [" word", "x" * 200, *[" t"] * (n - 2)], "logps": [-i / 8 for i in range(n)],
        "advantages": [(i - n / 2) / n for i in range(n)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "background"), [("dark", "rgb(21, 24, 29)"), ("light", "rgb(246, 247, 249)")]
)
def test_it_fits_and_can_be_read(tmp_path, scheme, background):
    (tmp_path / "completions").mkdir()
    rows = [row(0, 1.0, True), row(1, 0.0, False), row(2, 0.2, None)]
    for step in range(16):
        write_parquet(rows, step, tmp_path / "completions" / f"step_{step:06d}.parquet")
    write_page(tmp_path)
    for measured in chromium.measured(tmp_path, tmp_path / "completions.html", scheme, CONTRAST):
        _, fits, color, (contrast, _) = measured
        assert fits and color == background and contrast >= 4.5, measured

"""Tests of the completions page in Chromium: layout on a phone, and contrast in both schemes."""

import json
import re
import shutil
import subprocess

import pytest

from grpo_fast.train.report.page import CompletionsPage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")

# Web page that shows the completions page (PAGE, a JSON string) in frames of two widths. For each
# frame and each way of shading the tokens, it writes measurements into its title:
# - the width of the frame, and whether the content fits into this width
# - the background color
# - the lowest contrast ratio of a text to its background (WCAG 2.2, 1.4.3), and the text's HTML
# A transparent background is blended with the background of the parent element.
HARNESS = """<body><script>
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
const contrast = page => {
  let least = [Infinity, ''];
  for (const node of page.body.querySelectorAll('*')) {
    if (![...node.childNodes].some(c => c.nodeType === 3 && c.data.trim())) continue;
    const [dark, bright] = [light(parse(getComputedStyle(node).color).rgb), light(behind(node))]
      .sort((a, b) => a - b);
    const found = (bright + 0.05) / (dark + 0.05);
    if (found < least[0]) least = [found, node.outerHTML.slice(0, 120)];
  }
  return least;
};
const rows = [];
for (const width of [390, 1280]) {
  const frame = document.createElement('iframe');
  Object.assign(frame, {width, srcdoc: PAGE, onload: () => {
    const page = frame.contentDocument;
    const fits = page.documentElement.scrollWidth <= page.documentElement.clientWidth;
    for (const shade of ['by-logp', 'by-advantage']) {
      page.getElementById(shade).checked = true;
      rows.push([width, fits, getComputedStyle(page.body).backgroundColor, ...contrast(page)]);
    }
    document.title = JSON.stringify(rows);
  }});
  document.body.append(frame);
}
</script>"""


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


@pytest.mark.parametrize(
    ("scheme", "background"), [("0", "rgb(21, 24, 29)"), ("1", "rgb(246, 247, 249)")],
    ids=["dark", "light"],
)  # fmt: skip
def test_it_fits_and_can_be_read(tmp_path, scheme, background):
    page = CompletionsPage(tmp_path / "completions.html", "a-run-of-mine")
    for step in range(40):
        page.add(step, [row(0, 1.0, True), row(1, 0.0, False), row(2, 0.2, None)])
    text = json.dumps(page.path.read_text(encoding="utf-8")).replace("</", "<\\/")
    (tmp_path / "harness.html").write_text(HARNESS.replace("PAGE", text), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={tmp_path}", f"--blink-settings=preferredColorScheme={scheme}",
               (tmp_path / "harness.html").as_uri()]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, check=True, timeout=240, text=True).stdout
    rows = json.loads(re.search("<title>(.*)</title>", shown)[1])
    assert sorted(width for width, *_ in rows) == [390, 390, 1280, 1280]
    for width, fits, color, contrast, where in rows:
        assert fits and color == background and contrast >= 4.5, (width, contrast, where)

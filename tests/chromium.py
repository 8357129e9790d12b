"""Measurements of HTML pages in headless Chromium."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

COMMAND = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (390, 1280)  # CSS pixels of a phone and of a desktop screen
SCHEMES = {"dark": 0, "light": 1}
# Embed the measured page as a `srcdoc`, because scripts cannot access a frame with another file.
HARNESS = """<base href="BASE"><body><script>
const rows = [];
const measure = MEASURE;
for (const width of WIDTHS) {
  const frame = document.createElement('iframe');
  Object.assign(frame, {width, srcdoc: PAGE, onload: () => {
    const page = frame.contentDocument;
    const fits = page.documentElement.scrollWidth <= page.documentElement.clientWidth;
    rows.push([width, fits, getComputedStyle(page.body).backgroundColor, measure(page)]);
    document.title = JSON.stringify(rows);
  }});
  document.body.append(frame);
}
</script>"""


def measured(
    folder: Path, page: Path, scheme: str, measure: str = "page => null"
) -> list[tuple[int, bool, str, Any]]:
    """Show a page in frames of two widths, and measure it in each frame.

    Args:
        folder: Folder for temporary files.
        page: The HTML file.
        scheme: The color scheme, "dark" or "light".
        measure: JavaScript function that takes the frame's document and returns a JSON value.

    Returns:
        For each of the widths in `WIDTHS`: the width, whether the content fits into the width, the
        background color, and the result of `measure`.
    """
    values = {
        "BASE": page.resolve().parent.as_uri() + "/", "MEASURE": measure, "WIDTHS": str([*WIDTHS]),
        "PAGE": json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/"),
    }  # fmt: skip
    text = re.sub("|".join(values), lambda found: values[found[0]], HARNESS)
    (folder / "harness.html").write_text(text, encoding="utf-8")
    command = [str(COMMAND), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               "--virtual-time-budget=10000", f"--user-data-dir={folder}",
               f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
               (folder / "harness.html").as_uri()]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, check=True, timeout=240, text=True).stdout
    found = re.search("<title>(.*)</title>", shown)
    rows = json.loads(found[1]) if found else []
    assert sorted(row[0] for row in rows) == [*WIDTHS], shown[:2000]
    return rows

"""Photographs the unit explorer: `PYTHONPATH=. python docs/hooks/still.py`, in the
environment of the tests with playwright.

It writes docs/pictures/explorer-light.png and explorer-dark.png. It needs Chromium or
Chrome.
"""

import io
from pathlib import Path

from PIL import Image

from tests import browser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explorer/index.html"
CHOICE = "bn_after_addition/identity/110"
SIZE = {"width": 1280, "height": 845}
#: Colours of a picture: a quarter of the bytes, without a difference to see.
COLOURS = 96


def main() -> None:
    for scheme in ("light", "dark"):
        with browser.opened_tab(viewport=SIZE, color_scheme=scheme) as (tab, _):
            tab.goto(f"{PAGE.as_uri()}#{CHOICE}")
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            path = ROOT / f"docs/pictures/explorer-{scheme}.png"
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"Written: {path}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

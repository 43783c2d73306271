"""Photographs the unit explorer: `pip install playwright; python docs/hooks/still.py`.

It writes docs/pictures/explorer-light.png and explorer-dark.png. It needs Chromium or
Chrome.
"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explorer/index.html"
CHOICE = "bn_after_addition/identity/110"
SIZE = {"width": 1280, "height": 845}
#: Colours of a picture: a quarter of the bytes, without a difference to see.
COLOURS = 96


def main() -> None:
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, browsers)), args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
            tab.goto(f"{PAGE.as_uri()}#{CHOICE}")
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            path = ROOT / f"docs/pictures/explorer-{scheme}.png"
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"Written: {path}, {path.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()

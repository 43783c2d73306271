"""Film the command line: `pip install pyte`, then `python docs/hooks/film.py` runs the commands of
`COMMANDS` in a terminal and writes docs/pictures/film.svg. Pauses of more than `LONGEST`
seconds are cut to that, and the rest runs `SPEED` times as fast; the texts are as they were shown.
"""

import itertools
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "keras-preact train digits --epochs 12 --output runs/digits",
    "keras-preact evaluate runs/digits",
    "keras-preact export runs/digits --name digits",
)
COLUMNS, LINES = 108, 24
#: Seconds of a pause, between two frames, for a typed letter and at the end.
LONGEST, INTERVAL, LETTER, END = 0.8, 0.15, 0.03, 6.0
#: How many times as fast as the commands ran the film shows them.
SPEED = 2
#: Pixels of a letter and around the picture.
WIDTH, HEIGHT, MARGIN = 8.4, 18, 14
INK, PAPER = "#e6e6e6", "#17191b"
HUES = {
    "red": "#ff8a7a",
    "green": "#5fd6a2",
    "brown": "#f0b35a",
    "blue": "#7db4ff",
    "magenta": "#e29bea",
    "cyan": "#6fd3e0",
}

#: The text of a line from a column on, its colour and whether it is bold.
Span = tuple[int, str, str, bool]
Frame = tuple[tuple[Span, ...], ...]


def output_of(command: str, folder: str) -> Iterator[bytes]:
    """Run a command in a terminal of its own; yield what it writes, as it writes it."""
    terminal, child = pty.openpty()
    termios.tcsetwinsize(child, (LINES, COLUMNS))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"TERM": "xterm-256color", "PATH": path}
    with subprocess.Popen(
        command.split(), cwd=folder, stdin=child, stdout=child, stderr=child, env=environment
    ) as process:
        os.close(child)
        while True:
            ready, _, _ = select.select([terminal], [], [], INTERVAL)
            try:
                yield os.read(terminal, 65536) if ready else b""
            except OSError:  # the command has closed its end
                break
    os.close(terminal)
    if process.returncode:
        raise RuntimeError(f"{command} ended with status {process.returncode}")


def film() -> list[tuple[float, Frame]]:
    """Run the commands; return every change of the screen and the second when it is shown."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    frames: list[tuple[float, Frame]] = []
    now = 0.0

    def show() -> None:
        frame = tuple(map(spans, range(LINES)))
        if not frames or frames[-1][1] != frame:
            frames.append((now, frame))

    def spans(line: int) -> tuple[Span, ...]:
        found, column = [], 0
        characters = (screen.buffer[line][each] for each in range(COLUMNS))
        for (hue, bold), letters in itertools.groupby(characters, lambda c: (c.fg, c.bold)):
            text = "".join(letter.data for letter in letters)
            if text.strip():
                found.append((column, text.rstrip(), HUES.get(hue, colour(hue)), bold))
            column += len(text)
        return tuple(found)

    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            stream.feed(b"\x1b[1;32m$\x1b[0m ")
            for letter in command:
                stream.feed(letter.encode())
                now += LETTER
                show()
            now += LONGEST
            stream.feed(b"\r\n")
            last, quiet = time.monotonic(), 0.0
            for written in output_of(command, folder):
                elapsed, last = time.monotonic() - last, time.monotonic()
                quiet = 0.0 if written else quiet + elapsed
                now += elapsed / SPEED if quiet < LONGEST else 0.0
                stream.feed(written)
                if now - frames[-1][0] >= INTERVAL:
                    show()
            show()
            now += 2 * LONGEST
            stream.feed(b"\r\n")
    return frames


def colour(name: str) -> str:
    """Return the colour of a terminal's 256 that has six hexadecimal digits."""
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else INK


def drawn(frames: list[tuple[float, Frame]]) -> str:
    """Return the film as an SVG: its frames side by side, of which one is in view. It
    begins with the last frame, so that a reader sees a full terminal at once.
    """
    width, height = COLUMNS * WIDTH + 2 * MARGIN, LINES * HEIGHT + 2 * MARGIN
    seconds = frames[-1][0] + END
    lines = {line for _, frame in frames for line in frame if line}
    names = {line: f"l{number}" for number, line in enumerate(sorted(lines))}
    texts = "".join(f'<g id="{name}">{_line(line)}</g>\n' for line, name in names.items())
    places = "".join(
        f'<g transform="translate({number * width:g})">'
        + "".join(
            f'<use href="#{names[line]}" y="{i * HEIGHT}"/>' for i, line in enumerate(frame) if line
        )
        + "</g>\n"
        for number, (_, frame) in enumerate(frames)
    )
    steps = "".join(
        f"{100 * start / seconds:.3f}%{{transform:translateX({-number * width:g}px)}}"
        for number, (start, _) in enumerate(frames)
    )
    end = f"translateX({-(len(frames) - 1) * width:g}px)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" height="{height}">\n<title>A terminal: {"; ".join(COMMANDS)}</title>\n'
        "<style>text{white-space:pre;font:14px ui-monospace,Menlo,Consolas,monospace}"
        f".bold{{font-weight:bold}}@keyframes film{{{steps}100%{{transform:{end}}}}}"
        f".film{{animation:film {seconds:.1f}s steps(1,end) {END / 2 - seconds:.1f}s infinite}}"
        f"@media(prefers-reduced-motion:reduce){{.film{{animation:none;transform:{end}}}}}"
        f"</style>\n<defs>\n{texts}</defs>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>\n'
        f'<g transform="translate({MARGIN} {MARGIN})"><g class="film">\n{places}</g></g>\n</svg>\n'
    )


def _line(line: tuple[Span, ...]) -> str:
    return "".join(
        f'<text x="{column * WIDTH:g}" y="{HEIGHT - 5}" textLength="{len(text) * WIDTH:g}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{hue}" class="{"bold" if bold else ""}">'
        f"{escape(text)}</text>"
        for column, text, hue, bold in line
    )


def main() -> None:
    if not shutil.which("keras-preact", path=str(Path(sys.executable).parent)):
        sys.exit("error: install the package first: pip install -e '.[training]'")
    frames = film()
    file = ROOT / "docs/pictures/film.svg"
    file.write_text(drawn(frames), encoding="utf-8")
    seconds, size = frames[-1][0] + END, file.stat().st_size
    print(f"Wrote {file}: {len(frames)} frames, {seconds:.0f} s, {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

"""What happens to images before the model sees them, counted."""

import struct
from collections.abc import Iterable
from typing import NamedTuple


class Header(NamedTuple):
    """What the header of an image says."""

    height: int
    width: int
    is_gray: bool
    has_transparency: bool


def header(file: bytes) -> Header:
    """Return the header of a PNG, JPEG or WebP that the model has decoded."""
    import tensorflow as tf

    if file.startswith(b"\xff\xd8"):
        height, width, channels = tf.image.extract_jpeg_shape(file).numpy().tolist()
        return Header(height, width, channels == 1, False)
    if file.startswith(b"RIFF"):
        return _webp(file)
    width, height, _, colours = struct.unpack(">IIBB", file[16:26])
    # an image without an alpha channel may have a transparent colour, or a palette with some
    has_colour = file.find(b"tRNS", 0, file.find(b"IDAT")) >= 0
    return Header(height, width, colours in (0, 4), colours in (4, 6) or has_colour)


def _webp(file: bytes) -> Header:
    """Return the header of a WebP, which begins with one of three kinds of chunks."""
    kind = file[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", file[26:30])
        return Header(height % 2**14, width % 2**14, False, False)
    if kind == b"VP8L":
        bits = int.from_bytes(file[21:25], "little")
        return Header((bits >> 14) % 2**14 + 1, bits % 2**14 + 1, False, bool(bits >> 28 & 1))
    width, height = (int.from_bytes(file[i : i + 3], "little") + 1 for i in (24, 27))
    return Header(height, width, False, bool(file[20] & 16))


class Conversions:
    """Counts the images of which a person may want to know that they were changed.

    Args:
        shape: Height, width and channels of the model's images.
        crops: Whether the model scales and crops images, as in its training.
    """

    def __init__(self, shape: Iterable[int], crops: bool):
        self._height, self._width, self._channels = shape
        self._crops = crops
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}

    def add(self, name: str, image: Header) -> None:
        rows, columns = image.height, image.width
        if (rows, columns) != (self._height, self._width) and not self._crops:
            is_scaled = rows * self._width == columns * self._height
            how = "scaled" if is_scaled else "stretched"
            kind = f"{how} to {self._width} x {self._height} pixels"
            self._count(kind, f"{name} ({columns} x {rows})")
        if image.is_gray != (self._channels == 1):
            way = "grayscale to colour" if image.is_gray else "colour to grayscale"
            self._count(f"converted from {way}", name)
        if image.has_transparency:
            self._count("read without their transparency", name)

    def _count(self, kind: str, name: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        examples = self._examples.setdefault(kind, [])
        if len(examples) < 3:
            examples.append(name)

    def sentences(self) -> list[str]:
        """Return a sentence for each kind of change, with the first images."""
        return [
            f"Images were {kind}: {', '.join(self._examples[kind])}"
            + (f" and {count - 3:,} more." if count > 3 else ".")
            for kind, count in self._counts.items()
        ]

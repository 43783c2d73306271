"""Image files made byte by byte, of kinds that Pillow does not write."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encode(image, kind="PNG", **options) -> bytes:
    """Return an array or Pillow image as a file."""
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
        stream, kind, **options
    )
    return stream.getvalue()


def noise(height=12, width=20, channels=3, seed=0) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, "uint8")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, data: bytes, more: bytes = b"") -> bytes:
    """Return a PNG of rows that begin with their filter; `more`: chunks before the
    data.
    """
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + more
        + chunk(b"IDAT", zlib.compress(data, 9))
        + chunk(b"IEND", b"")
    )

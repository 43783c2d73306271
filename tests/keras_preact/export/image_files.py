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


def blocks(data: bytes, size=255) -> bytes:
    """Return data as GIF holds them: in blocks, each with its length before it, and an
    empty one.
    """
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def palette(colours: np.ndarray) -> bytes:
    """Return a GIF's table of 128 colours."""
    return np.concatenate([colours, np.zeros((128 - len(colours), 3), "uint8")]).tobytes()


def frame(
    pixels: np.ndarray, place=(0, 0), colours=None, transparent=None, block_size=255
) -> bytes:
    """Return a GIF's frame of numbers below 128, written without compression: the code
    table is cleared before it grows.
    """
    codes = bytearray()
    for i, pixel in enumerate(pixels.astype("uint8").ravel().tolist()):
        if i % 100 == 0:
            codes.append(128)
        codes.append(pixel)
    codes.append(129)
    height, width = pixels.shape
    control = b"" if transparent is None else b"\x21\xf9\x04\x01\0\0" + bytes([transparent, 0])
    local = b"" if colours is None else palette(colours)
    flags = 0 if colours is None else 0x86
    descriptor = struct.pack("<BHHHHB", 0x2C, place[1], place[0], width, height, flags)
    return control + descriptor + local + b"\x07" + blocks(bytes(codes), block_size)


def gif(screen: tuple[int, int], colours, *parts: bytes, trailer=b";") -> bytes:
    """Return a GIF of parts such as frames, with a common table of colours unless that
    is None.
    """
    flags = 0x70 if colours is None else 0xF6
    header = b"GIF89a" + struct.pack("<HHBBB", screen[1], screen[0], flags, 0, 0)
    return header + (b"" if colours is None else palette(colours)) + b"".join(parts) + trailer

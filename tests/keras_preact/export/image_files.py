"""Image files of every kind. Those that Pillow does not write are made byte by byte."""

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


def png(
    width: int,
    height: int,
    depth: int,
    colour: int,
    data: bytes,
    more: bytes = b"",
    passes: int = 0,
) -> bytes:
    """Return a PNG of rows that begin with their filter; `more`: chunks before the
    data; `passes`: 1 if it is interlaced.
    """
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, passes))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + more
        + chunk(b"IDAT", zlib.compress(data, 9))
        + chunk(b"IEND", b"")
    )


def _rows(pixels: np.ndarray) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def bmp(bits: int, data: bytes, compression: int = 0, more: bytes = b"", height: int = 12) -> bytes:
    """Return a BMP 20 pixels wide; `more`: masks of the channels, or the palette."""
    start = 54 + len(more)
    sizes = (40, 20, height, 1, bits, compression, len(data), 0, 0, 256 if bits == 8 else 0, 0)
    return (
        b"BM"
        + struct.pack("<IHHI", start + len(data), 0, 0, start)
        + struct.pack("<IiiHHIIiiII", *sizes)
        + more
        + data
    )


def served() -> dict[str, bytes]:
    """Files of 12 x 20 pixels of every kind that the server reads, as the training does."""
    colour, gray, rgba = noise(), noise(channels=1), noise(channels=4)
    image, with_palette = Image.fromarray(colour), Image.fromarray(colour).quantize(16)
    deep = np.random.default_rng(2).integers(0, 2**16, (12, 20, 4)).astype(">u2")
    places = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))
    passes = b"".join(_rows(colour[y::dy, x::dx]) for y, x, dy, dx in (*places, (1, 0, 2, 1)))
    turned = Image.Exif()
    turned[0x0112] = 6
    two = {"save_all": True, "append_images": [Image.fromarray(noise(seed=1))]}
    return {
        "png rgb": encode(colour),
        "png gray": encode(gray),
        "png gray alpha": encode(noise(channels=2)),
        "png rgba": encode(rgba),
        "png 1 bit": encode(Image.fromarray(gray).convert("1")),
        "png palette": encode(with_palette),
        "png palette alpha": encode(with_palette, transparency=bytes(range(0, 160, 10))),
        "png one colour clear": encode(colour, transparency=(1, 2, 3)),
        "png interlaced": png(20, 12, 8, 2, passes, passes=1),
        "png animated": encode(image, **two),
        "png gray 16 bits": png(20, 12, 16, 0, _rows(deep[..., :1])),
        "png gray alpha 16 bits": png(20, 12, 16, 4, _rows(deep[..., :2])),
        "png rgb 16 bits": png(20, 12, 16, 2, _rows(deep[..., :3])),
        "png rgba 16 bits": png(20, 12, 16, 6, _rows(deep)),
        "jpeg rgb": encode(colour, "JPEG"),
        "jpeg gray": encode(gray, "JPEG"),
        "jpeg fine": encode(colour, "JPEG", quality=95, subsampling=0),
        "jpeg progressive": encode(colour, "JPEG", progressive=True),
        "jpeg cmyk": encode(image.convert("CMYK"), "JPEG"),
        "jpeg turned": encode(colour, "JPEG", exif=turned),
        "jpeg of several": encode(image, "MPO", **two),
        "webp lossy": encode(colour, "WEBP"),
        "webp lossless": encode(colour, "WEBP", lossless=True),
        "webp lossy alpha": encode(rgba, "WEBP"),
        "webp lossless alpha": encode(rgba, "WEBP", lossless=True),
        "webp lossless profile": encode(rgba, "WEBP", lossless=True, icc_profile=b"profile"),
    }


def not_served() -> dict[str, bytes]:
    """Files of 12 x 20 pixels of kinds that the server does not read."""
    colour, gray, rgba = noise(), noise(channels=1), noise(channels=4)
    image, clear = Image.fromarray(colour), Image.fromarray(rgba)
    other = Image.fromarray(noise(channels=4, seed=1))
    two = {"save_all": True, "append_images": [Image.fromarray(noise(seed=1))]}
    high = noise(channels=2).tobytes()
    bgrx = struct.pack("<3I", 0xFF0000, 0xFF00, 0xFF)
    xbgr = struct.pack("<3I", 0xFF000000, 0xFF0000, 0xFF00)
    grays = b"".join(bytes([i, i, i, 0]) for i in range(256))
    return {
        "gif": encode(colour, "GIF"),
        "gif animated": encode(image, "GIF", **two),
        "tiff": encode(colour, "TIFF"),
        "bmp 1 bit": encode(Image.fromarray(gray).convert("1"), "BMP"),
        "bmp 8 bits gray": encode(gray, "BMP"),
        "bmp 8 bits palette": encode(image.quantize(16), "BMP"),
        "bmp 8 bits compressed": bmp(8, 12 * b"\24\5\0\0" + b"\0\1", 1, grays),
        "bmp 16 bits": bmp(16, high),
        "bmp 16 bits 565": bmp(16, high, 3, struct.pack("<3I", 0xF800, 0x7E0, 0x1F)),
        "bmp 24 bits": encode(colour, "BMP"),
        "bmp 24 bits from the top": bmp(24, colour.tobytes(), height=-12),
        "bmp 32 bits": encode(rgba, "BMP"),
        "bmp 32 bits bgrx": bmp(32, rgba.tobytes(), 3, bgrx),
        "bmp 32 bits xbgr": bmp(32, rgba.tobytes(), 3, xbgr),
        "webp animated": encode(image, "WEBP", **two),
        "webp animated alpha": encode(clear, "WEBP", save_all=True, append_images=[other]),
    }

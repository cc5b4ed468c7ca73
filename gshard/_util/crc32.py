"""CRC-32 by zlib-ng where it is installed (`gshard[fast]`), which is many times as fast."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32


def seal(line: bytes) -> bytes:
    """A line of text, and one with its CRC-32."""
    line += b"\n"
    return line + b"%08x\n" % crc32(line)


def unseal(data: bytes) -> bytes:
    """The line; a `ValueError` if it is not what was sealed."""
    line, end, seal = data[:-9], data[-10:-9], data[-9:]
    if end != b"\n" or seal != b"%08x\n" % crc32(line):
        raise ValueError("the seal is broken")
    return line

"""CRC-32 by zlib-ng where it is installed (`gshard[fast]`), which is many times as fast."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

"""Seeds made of numbers that identify what draws."""

from __future__ import annotations

import hashlib
import struct

_SEED_BYTES = 8


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every one of ``parts`` (integers of any size), the same on every machine."""
    packed = b"".join(struct.pack("<q", (part + 2**63) % 2**64 - 2**63) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=_SEED_BYTES).digest(), "little") >> 1

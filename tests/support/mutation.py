"""Bytes with a few changes, of the kind that reach further into a parser than noise does."""

from __future__ import annotations

import random

WORDS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"0", b"1e309", b"9" * 30, b'"$bytes"', b"\\ud800", b"\x00",
         b"\xff", b"\n", b"\r\n", b"\r", b"data:", b"\xc0", b"\x81", b"\xdc\xff\xff", b"\xcf" + b"\xff" * 8, b"=", b"[[", b"'''"]  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to six changes: a byte, a piece left out, repeated or moved, a word put in."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(changed) + 1)
        end = min(len(changed), at + chance.randint(1, 12))
        piece = bytes(changed[at:end])
        match chance.randrange(5):
            case 0 if at < len(changed):
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = piece * chance.randint(1, 20)
            case 3:
                to = chance.randrange(len(changed) + 1)
                changed[to:to] = piece
            case _:
                changed[at:at] = chance.choice(WORDS)
    return bytes(changed)

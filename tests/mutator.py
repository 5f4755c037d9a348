"""Almost valid inputs: valid bytes with random changes."""

import re
import struct

LONGEST = 1 << 16  # bytes of an input
NUMBER = re.compile(rb"-?\d[\d.]*")
NUMBERS = [
    b"-1",
    b"0",
    b"1",
    b"2",
    b"1.5",
    b"4294967296",
    b"18446744073709551616",
    b"1" * 400,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"null",
    b"true",
    b'"1"',
    b"[]",
    b"{}",
    b"ffffffffff",
]
WORDS = [
    b"\r\n",
    b"\n",
    b"\0",
    b"\xff",
    b"\xc3\xa9",
    b"\xed\xa0\x80",
    b" ",
    b"/",
    b"//",
    b"?",
    b"#",
    b"%",
    b"%00",
    b"%2f",
    b"..",
    b":",
    b",",
    b";",
    b'"',
    b"\\ud800",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"": ',
    b"[" * 20000,
    b'{"a":' * 20000,
    b"GET",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"TRACE",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"/v1/status",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n",
    b"Content-Length: 0\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: close\r\n",
    b"Host: [\r\n",
    b"Authorization: Bearer \r\n",
    b"//[]",
    b"X: " + b"x" * 20000,
    b"0\r\n\r\n",
    b"7fffffff\r\n",
    b"-1\r\n",
    b"SDLU",
    b"SDLR",
]
INTEGERS = {
    form: [value & (1 << 8 * size) - 1 for value in (0, 1, 2, 255, 1 << 16, 1 << 31, 1 << 63, -1, -2)]
    for form, size in (("<H", 2), ("<I", 4), ("<Q", 8))
}
FLOATS = [0.0, -0.0, -1.0, 5e-324, 1e-38, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan")]


def flip(random, data, other):
    place, bit = random.randrange(len(data) or 1), 1 << random.randrange(8)
    return data[:place] + bytes(byte ^ bit for byte in data[place : place + 1]) + data[place + 1 :]


def overwrite(random, data, other):
    """Put an extreme number where a field of a header or vector may be."""
    form = random.choice(["<H", "<I", "<Q", "<d", "<f"])
    value = struct.pack(form, random.choice(INTEGERS.get(form) or FLOATS[form == "<f" and 7 :]))
    place = random.randrange(0, len(data) + 1, 2 if form == "<H" else 4)
    return data[:place] + value + data[place + len(value) :]


def renumber(random, data, other):
    """Replace a decimal number by an extreme one."""
    found = list(NUMBER.finditer(data[:4096]))
    if not found:
        return data
    start, end = random.choice(found).span()
    return data[:start] + random.choice(NUMBERS) + data[end:]


def truncate(random, data, other):
    return data[: random.randrange(len(data) + 1)]


def snapshot(random, data, other):
    start, end = _span(random, data)
    return data[:start] + data[end:]


def duplicate(random, data, other):
    start, end = _span(random, data)
    return data[:end] + data[start:]


def splice(random, data, other):
    """Replace a span by one of another input."""
    (start, end), (first, last) = _span(random, data), _span(random, other)
    return data[:start] + other[first:last] + data[end:]


def extend(random, data, other):
    return data + random.choice([other, random.randbytes(random.randrange(1, 300))])


def insert(random, data, other):
    start, end = _span(random, data)
    return data[:start] + random.choice(WORDS) + data[random.choice([start, end]) :]


def noise(random, data, other):
    return random.randbytes(random.randrange(300))


OPERATIONS = [flip, overwrite, renumber, truncate, snapshot, duplicate, splice, extend, insert]


def mutate(random, data, other):
    """Return bytes with a few random changes, some with parts of ``other``."""
    if random.random() < 0.01:
        return noise(random, data, other)
    for _ in range(random.choice([1, 1, 1, 2, 3, 5])):
        data = random.choice(OPERATIONS)(random, data, other)
    return data[:LONGEST]


def _span(random, data):
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice([1, 4, 16, 64, len(data)]))

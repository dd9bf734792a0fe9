"""Measure how fast one thread encodes, decodes and averages updates, relative to copying the same values.

./tools/bench codecs [--rounds N] [--json FILE]

Each figure is the median over rounds, in GB of float32 per second; parts have the size of a round's parts. Means are of
CONTRIBUTORS encoded updates each, with and without clipping (rounds/influence.py). Each member takes square sums of results.
Beside it: the most memory that encoding and decoding a part takes, with its result, as tracemalloc sees it, and what Huffman
coding of the bytes leaves of them. Last come the pieces of a base, as peers download them: random values, and the same in
bfloat16.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from bench_json import parser_of, write

from spes_p2p.content.floats import pack_floats, unpack_floats
from spes_p2p.rounds.codecs import CODECS, Codec
from spes_p2p.rounds.digest import PIECE_ELEMENTS
from spes_p2p.rounds.influence import Contribution, clipped_mean, square_sum
from spes_p2p.rounds.parts import part_elements

VALUES = 2**25
"""128 MB of float32, more than a processor's caches hold."""
CONTRIBUTORS = 4


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 (default 7)")
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error(f"--rounds {arguments.rounds}: must be at least 5")
    values = np.random.default_rng(0).standard_normal(VALUES, np.float32) * np.float32(1e-3)
    works = _works(values)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(arguments.rounds + 1):
        for name, work in works.items():
            started = time.thread_time()
            work()
            seconds[name].append(time.thread_time() - started)
    speeds = {name: values.nbytes / 1e9 / statistics.median(taken[1:]) for name, taken in seconds.items()}
    report: dict[str, Any] = {"copy": speeds["copy"], "square sum": speeds["square sum"]}
    print(f"copy  {speeds['copy']:.2f} GB/s; square sum {speeds['square sum']:.2f} GB/s")
    for codec in CODECS:
        encode, decode = speeds[f"encode {codec}"], speeds[f"decode {codec}"]
        plain, clipped = speeds[f"mean {codec}"], speeds[f"clipped mean {codec}"]
        of_part = part_costs(CODECS[codec], values)
        report[codec] = {"encode": encode, "decode": decode, "mean": plain, "clipped mean": clipped, **of_part}
        print(f"{codec:5} encode {encode:.2f} GB/s, {encode / speeds['copy']:.2f} of a copy; "
              f"decode {decode:.2f} GB/s, {decode / speeds['copy']:.2f} of a copy; "
              f"mean {plain:.2f} GB/s, clipped {clipped:.2f} GB/s: {plain / clipped:.2f} times the seconds; "
              f"a part takes {of_part['encode_bytes'] / 1e6:.1f} and {of_part['decode_bytes'] / 1e6:.1f} MB; "
              f"Huffman {of_part['huffman']:.2f}")
    for name, stored in _bases(values).items():
        pack, unpack = speeds[f"pack {name}"], speeds[f"unpack {name}"]
        left = sum(map(len, map(pack_floats, _pieces(stored)))) / stored.nbytes
        report[f"base {name}"] = {"pack": pack, "unpack": unpack, "bytes": left}
        print(f"base of {name}: pack {pack:.2f} GB/s, unpack {unpack:.2f} GB/s, {left:.3f} of the bytes")
    write(report, arguments.json)
    return 0


def part_costs(codec: Codec, values: np.ndarray) -> dict[str, float]:
    """Return the peak memory of encoding and of decoding one part of these values, and Huffman's share of its bytes."""
    part = values[: part_elements(codec)]
    encoded = codec.encode(part)
    codec.decode(encoded, part.size)
    coder = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(encoded) + coder.flush()
    return {
        "encode_bytes": _peak_bytes(partial(codec.encode, part)),
        "decode_bytes": _peak_bytes(partial(codec.decode, encoded, part.size)),
        "huffman": len(coded) / len(encoded),
    }


def _peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _works(values: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return the timed functions by name; each processes all values, part by part."""
    works: dict[str, Callable[[], object]] = {"copy": partial(np.copyto, np.empty_like(values), values)}
    works["square sum"] = partial(square_sum, values)
    for name, codec in CODECS.items():
        size = part_elements(codec)
        parts = [values[start : start + size] for start in range(0, values.size, size)]
        codes = [(codec.encode(part), part.size) for part in parts]
        works |= {f"encode {name}": partial(_each, codec.encode, [(part,) for part in parts])}
        works |= {f"decode {name}": partial(_each, codec.decode, codes)}
        works |= {f"mean {name}": partial(_average, codec, codes, False)}
        works |= {f"clipped mean {name}": partial(_average, codec, codes, True)}
    for name, stored in _bases(values).items():
        packed = [pack_floats(piece) for piece in _pieces(stored)]
        works |= {f"pack {name}": partial(_each, pack_floats, [(piece,) for piece in _pieces(stored)])}
        works |= {f"unpack {name}": partial(_each, unpack_floats, [(piece, PIECE_ELEMENTS) for piece in packed])}
    return works


def _bases(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a base may hold: these values as they are, and rounded towards zero to bfloat16."""
    return {"float32": values, "bfloat16": (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)}


def _pieces(values: np.ndarray) -> list[np.ndarray]:
    return [values[start : start + PIECE_ELEMENTS] for start in range(0, values.size, PIECE_ELEMENTS)]


def _average(codec: Codec, codes: Sequence[tuple[bytes, int]], clips: bool) -> None:
    """Average CONTRIBUTORS parts at a time."""
    for first in range(0, len(codes) - CONTRIBUTORS, CONTRIBUTORS):
        together = codes[first : first + CONTRIBUTORS]
        contributions = [Contribution(1, partial(codec.decode, *each)) for each in together]
        clipped_mean(contributions, np.empty(together[0][1], np.float32), clips)


def _each(function: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call the function with each; a result is freed before the next call."""
    for each in arguments:
        function(*each)


if __name__ == "__main__":
    raise SystemExit(main())

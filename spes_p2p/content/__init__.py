"""Verified content: pieces with known hashes, served by every peer and fetched from several donors at once.

    pieces        the types, and a table of the kinds of content
    fetcher       every download: donors, retries, limits
    transfer      the wire: serving pieces, and a peer as a donor
    files, bases, tokens, relay    kinds of content; kept results are in `peer/kept_results.py`
"""

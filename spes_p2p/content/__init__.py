"""Content that proves itself: pieces with known hashes, served by every peer, fetched from several donors at once."""

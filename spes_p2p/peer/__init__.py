"""The life of one peer, and the wiring that gives it a network, a disk and observers."""

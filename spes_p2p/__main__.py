"""`python -m spes_p2p` is `spes-p2p`."""

from spes_p2p.cli import main

if __name__ == "__main__":
    main()

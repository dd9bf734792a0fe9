"""The program: `spes-p2p`, or `python -m spes_p2p`."""

import gc
import io
import os
import signal
import sys

COLLECT_AFTER = 50_000
"""New objects between two collections of garbage in a command: importing makes many that stay. Peers collect more often."""


def main() -> None:
    """Import and run the command line."""
    gc.set_threshold(COLLECT_AFTER)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would read the metadata of all installed packages
    if "JPY_PARENT_PID" in os.environ:
        os.environ["TERM"] = "dumb"  # a notebook's cell looks like a terminal, but keeps each frame of a spinner
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding than UTF-8 gets ? for what it lacks
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as in a shell's background
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    from spes_p2p.cli import main as run

    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

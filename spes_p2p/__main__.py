"""The program: `spes-p2p`, or `python -m spes_p2p`."""

import signal


def main() -> None:
    """Import and run the command line."""
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as in a shell's background
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    from spes_p2p.cli import main as run

    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

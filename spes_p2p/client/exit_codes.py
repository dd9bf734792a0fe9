"""Exit codes of the commands, and the error line on stderr."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from spes_p2p.errors import Broken, UserError, printable
from spes_p2p.observe.log import json_line


def exit_with(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit with its code; print errors that users cause as one line on stderr."""
    try:
        sys.exit(command() or 0)
    except UserError as error:
        _fail(str(error), 1 if isinstance(error, Broken) else 2)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"{error.filename or 'a file'}: cannot be written ({error.strerror}); free disk space and start again")
        if error.filename is None:
            why = error.strerror or str(error) or type(error).__name__
            _fail(f"the system refused something that this command needs: {why}")
        if error.errno == errno.EISDIR:
            _fail(f"{error.filename}: is a folder where a file belongs; move it away, or name a file")
        _fail(f"{error.filename}: {error.strerror}; check the path and its permissions")
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer") and hasattr(error, "format_message"):
            problem = error.format_message().rstrip(".")
            if "unexpected extra argument" in problem:  # of `--text *.jsonl`, the option takes the first file only
                problem += "; give an option again for each further value"
            context = getattr(error, "ctx", None)
            _fail(f"{problem}; see {context.command_path if context else 'spes-p2p'} --help")
        raise


def _fail(message: str, exit_code: int = 2) -> NoReturn:
    line = json_line(printable(message), logging.ERROR) if "--log-json" in sys.argv else f"error: {printable(message)}"
    print(line, file=sys.stderr)
    sys.exit(exit_code)

"""Run one function in a process of its own, whose imports and memory end with it.

A bootstrap peer needs torch and transformers for a moment, to make the layout and base 0. Imported into the peer itself, they
would hold 300 MB for as long as the campaign runs.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from spes_p2p.errors import Broken, UserError
from spes_p2p.net.die_with_parent import under_guard

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Takes how much is done, and of how much."""


def run_apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a module's function returns in a new process. It ends with the calling thread, however that ends.

    Raises the UserError that it raises, or the OSError that names a file; Broken if it ends in any other way.
    """
    found: T = _result((function, args, kwargs, False), lambda done, total: None)
    return found


def run_apart_telling(
    on_progress: Progress, function: Callable[Concatenate[Progress, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Like `run_apart`, for a function that first takes what to call with its progress; `on_progress` is called here."""
    found: T = _result((function, args, kwargs, True), on_progress)
    return found


def _result(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool], on_progress: Progress) -> Any:
    command, request = [*under_guard(), sys.executable, "-m", __name__], pickle.dumps(call)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request)
            is_done, result = False, None
            with suppress(EOFError, pickle.UnpicklingError):
                while not is_done:
                    is_done, result = pickle.load(process.stdout)
                    if not is_done:
                        on_progress(*result)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise Broken(f"the process that runs {call[0].__name__} ended with code {process.returncode}; start this peer again")
    if isinstance(result, UserError | OSError):
        raise result
    return result


def main() -> None:
    """Run the function that standard input describes; write its progress, then its result, to standard output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no part of the result
    function, args, kwargs, tells = pickle.load(sys.stdin.buffer)

    def tell(done: int, total: int) -> None:
        pickle.dump((False, (done, total)), output)
        output.flush()

    try:
        result = function(*([tell] if tells else []), *args, **kwargs)
    except UserError as error:
        result = error
    except OSError as error:
        if error.filename is None:
            raise
        result = OSError(error.errno, error.strerror, error.filename)
    with output:
        pickle.dump((True, result), output)


if __name__ == "__main__":
    main()

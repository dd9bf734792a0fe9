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
from typing import ParamSpec, TypeVar

from spes_p2p.errors import Broken, UserError
from spes_p2p.net import die_with_parent

P = ParamSpec("P")
T = TypeVar("T")


def run_apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a module's function returns in a new process. It ends with the calling thread, however that ends.

    Raises the UserError that it raises; Broken if it ends in any other way.
    """
    wrapper = [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid())]
    command, request = [*wrapper, sys.executable, "-m", __name__], pickle.dumps((function, args, kwargs))
    ended = subprocess.run(command, input=request, stdout=subprocess.PIPE, check=False)
    if ended.returncode != 0:
        raise Broken(f"the process that runs {function.__name__} ended with code {ended.returncode}; start this peer again")
    result = pickle.loads(ended.stdout)
    if isinstance(result, UserError):
        raise result
    found: T = result
    return found


def main() -> None:
    """Run the function that standard input describes, write its result to standard output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no part of the result
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    try:
        result = function(*args, **kwargs)
    except UserError as error:
        result = error
    with output:
        pickle.dump(result, output)


if __name__ == "__main__":
    main()

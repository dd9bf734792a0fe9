"""What a command's failure comes to: an exit code and one line."""

from __future__ import annotations

import errno
import os

import pytest

from spes_p2p.client.exit_codes import exit_with


@pytest.mark.parametrize(("error", "line"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"),
     "error: a/b: cannot be written (No space left on device); free disk space and start again\n"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
     "error: a file: cannot be written (No space left on device); free disk space and start again\n"),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a/b"),
     "error: a/b: Permission denied; check the path and its permissions\n"),
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
     "error: the system refused something that this command needs: Too many open files\n"),
    (OSError("half \x1b[2Jwritten"), "error: the system refused something that this command needs: half ?[2Jwritten\n"),
    (BrokenPipeError(), "error: the system refused something that this command needs: BrokenPipeError\n"),
])
def test_whatever_the_system_refuses_is_one_line(error: OSError, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    assert (ended.value.code, capsys.readouterr().err) == (2, line)

"""What a command's failure comes to: an exit code and one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spes_p2p.cli.terminal import ended_by_signals, run
from spes_p2p.client.exit_codes import exit_with

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("error", "line"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"),
     "error: a/b: cannot be written (No space left on device); free disk space and start again\n"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
     "error: a file: cannot be written (No space left on device); free disk space and start again\n"),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a/b"),
     "error: a/b: Permission denied; check the path and its permissions\n"),
    (IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "a/b"),
     "error: a/b: is a folder where a file belongs; move it away, or name a file\n"),
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


def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-m", "spes_p2p", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_before_a_peer_takes_part_waits_for_no_thread() -> None:
    program = (
        "import asyncio, time\n"
        "from spes_p2p.cli.terminal import run_peer\n"
        "async def prepare():\n"
        "    print('preparing', flush=True)\n"
        "    await asyncio.to_thread(time.sleep, 600)\n"
        "run_peer(prepare())\n"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "preparing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")


def test_ctrl_c_while_a_command_computes_in_its_event_loop_ends_it_at_once() -> None:
    went_on = []

    async def compute() -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            run(compute())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not went_on

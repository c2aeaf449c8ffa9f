# SPDX-License-Identifier: Apache-2.0
"""Guests return what their command did, and leave nothing behind, however they end."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import wait_for

from . import vm
from .kernels import Kernel


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's guests have their working directories."""
    directory = tmp_path / "t"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def processes(directory: Path) -> list[str]:
    """Command lines that mention `directory`, of QEMU and virtiofsd in particular."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(directory) in line:
            found.append(line)
    return found


def assert_nothing_left(directory: Path) -> None:
    # Not at once: a child of a killed shell may take some more milliseconds to go.
    wait_for(lambda: not processes(directory))
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    assert not list(directory.iterdir())


def test_result(any_kernel: Kernel, tmp_path: Path, temporary: Path) -> None:
    """Exit code, output and files come back; the rest of the host stays as it is."""
    hostname = Path("/etc/hostname").read_bytes()
    result = vm.run(
        any_kernel,
        "echo changed >>/etc/hostname; tail -n 1 /etc/hostname; pwd; echo file >/out/file; exit 7",
        out=tmp_path,
    )
    assert result.exit_code == 7
    assert result.output == f"changed\n{vm.CHECKOUT}\n"
    assert (tmp_path / "file").read_text() == "file\n"
    assert Path("/etc/hostname").read_bytes() == hostname
    assert_nothing_left(temporary)


def test_panic(any_kernel: Kernel, tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(vm.GuestError, match="stopped before its command ended") as caught:
        vm.run(any_kernel, "echo started; echo c >/proc/sysrq-trigger; sleep 9", out=tmp_path)
    assert "Kernel panic" in str(caught.value)
    assert "started" in str(caught.value)
    assert_nothing_left(temporary)


def test_timeout(any_kernel: Kernel, tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(vm.GuestError, match="not finished after 2 s"):
        vm.run(any_kernel, "sleep 1000", out=tmp_path, timeout=2)
    assert_nothing_left(temporary)


def test_interrupt(
    any_kernel: Kernel, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C; not by a signal, which has no effect where a shell started us in the background."""

    def wait(*_: object) -> str:
        wait_for(lambda: any(line.startswith("qemu-system") for line in processes(temporary)))
        raise KeyboardInterrupt

    monkeypatch.setattr(vm, "_wait", wait)
    with pytest.raises(KeyboardInterrupt):
        vm.run(any_kernel, "sleep 1000", out=tmp_path)
    assert_nothing_left(temporary)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed(any_kernel: Kernel, temporary: Path, number: signal.Signals) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-m", "tests.guest.vm", f"--kernel={any_kernel.name}", "sleep 1000"],
        cwd=vm.CHECKOUT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: any(line.startswith("qemu-system") for line in processes(temporary)))
    finally:
        runner.send_signal(number)
        runner.wait(30)
    if number != signal.SIGKILL:
        assert_nothing_left(temporary)
        return
    wait_for(lambda: not processes(temporary))
    # Nobody was left to clean up: the next guest does, once it is sure.
    (stale,) = temporary.glob("writeback-guest.*")
    with vm._work_directory():
        assert stale.exists()
    os.utime(stale, (0, 0))
    with vm._work_directory() as work:
        assert list(temporary.glob("writeback-guest.*")) == [work]

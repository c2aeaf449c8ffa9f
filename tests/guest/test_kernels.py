# SPDX-License-Identifier: Apache-2.0
"""The cache of kernels, without a network: what it makes of apt's answers and of none."""

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from . import kernels


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for the kernel 6.1, and an apt that finds no network."""

    def answer(command: Sequence[str], directory: Path | None = None) -> str:
        raise kernels.AptError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "answer", answer)
    return tmp_path / "writeback-exporter/kernels/6.1-amd64"


def add(store: Path, version: str, age: float) -> None:
    """A complete kernel, as of `age` seconds ago."""
    (store / version / "lib/modules/6.1.0-1-cloud-amd64").mkdir(parents=True)
    (store / version / "vmlinuz").touch()
    (store / "current").write_text(version + "\n")
    then = (store / "current").stat().st_mtime - age
    os.utime(store / "current", (then, then))


def test_recent_kernel_needs_no_apt(store: Path) -> None:
    add(store, "6.1.9-1", age=60)
    kernel = kernels.fetch("6.1")
    assert (kernel.version, kernel.release, kernel.note) == ("6.1.9-1", "6.1.0-1-cloud-amd64", "")


def test_cached_kernel_without_network(store: Path) -> None:
    add(store, "6.1.9-1", age=kernels.REFRESH_SECONDS + 60)
    kernel = kernels.fetch("6.1")
    assert kernel.version == "6.1.9-1"
    assert kernel.note == "from the cache, for apt failed: no network"


def test_no_kernel_without_network(store: Path) -> None:
    with pytest.raises(kernels.KernelUnavailable, match=r"no network\. Remedy: ") as caught:
        kernels.fetch("6.1")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("store")
def test_unknown_kernel() -> None:
    with pytest.raises(kernels.KernelUnavailable, match=r"kernel 4\.19: unknown; known are 5\.10"):
        kernels.fetch("4.19")


def test_half_a_fetch_does_not_count(store: Path) -> None:
    """Killed after unpacking, before the rename."""
    add(store, "partial.x/6.1.9-1", age=0)
    (store / "current").unlink(missing_ok=True)
    with pytest.raises(kernels.KernelUnavailable):
        kernels.fetch("6.1")
    assert not list(store.glob("partial.*"))


def test_current_without_its_kernel_does_not_count(store: Path) -> None:
    add(store, "6.1.9-1", age=0)
    shutil.rmtree(store / "6.1.9-1")
    with pytest.raises(kernels.KernelUnavailable):
        kernels.fetch("6.1")


def test_newest_package(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another series (bookworm has 6.12 beside 6.1) nor another kind of package."""
    versions = {
        "linux-image-6.1.0-9-cloud-amd64": "6.1.9-1",
        "linux-image-6.1.0-10-cloud-amd64": "6.1.10-1",
        "linux-image-6.1.0-10-amd64": "6.1.10-1",
        "linux-image-6.1.0-10-cloud-amd64-dbg": "6.1.10-1",
        "linux-image-6.12.1+deb12-cloud-amd64": "6.12.1-1",
        "linux-image-cloud-amd64": "6.1.10-1",
    }
    asked = []

    def answer(command: Sequence[str], directory: Path | None = None) -> str:
        if "indextargets" in command:
            return "Debian http://mirror.invalid\nDebian-Security http://security.invalid\n"
        if "pkgnames" in command:
            return "\n".join(versions)
        if "show" in command:
            names = command[command.index("show") + 1 :]
            return "\n\n".join(f"Package: {name}\nVersion: {versions[name]}" for name in names)
        if "download" in command:
            asked.append(command[-1])
            raise kernels.AptError("that is all")
        return ""

    monkeypatch.setattr(kernels, "answer", answer)
    with pytest.raises(kernels.KernelUnavailable, match="that is all"):
        kernels.fetch("6.1")
    assert asked == ["linux-image-6.1.0-10-cloud-amd64=6.1.10-1"]

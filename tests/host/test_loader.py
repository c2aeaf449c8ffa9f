# SPDX-License-Identifier: Apache-2.0
"""Kernels on which no program can be loaded: each refusal has its reason and its remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from writeback_exporter.features import Refused
from writeback_exporter.kernel import libbpf, loader
from writeback_exporter.kernel.libbpf import LibbpfMissing
from writeback_exporter.names.attribution import attribution
from writeback_exporter.names.cgroups import Hierarchies, Hierarchy


def test_no_btf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "BTF", os.fspath(tmp_path / "absent"))
    with pytest.raises(Refused, match=r"absent is absent.*CONFIG_DEBUG_INFO_BTF=y") as caught:
        loader.Kernel()
    assert caught.value.reason == "no BTF"


def test_lockdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = tmp_path / "lockdown"
    monkeypatch.setattr(loader, "LOCKDOWN", os.fspath(state))
    state.write_text("none integrity [confidentiality]\n")
    with pytest.raises(Refused, match="boot with lockdown=integrity") as caught:
        loader.Kernel()
    assert caught.value.reason == "lockdown"
    state.write_text("none [integrity] confidentiality\n")
    loader.Kernel().close()


def test_no_libbpf(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_arguments: object, **_options: object) -> None:
        raise OSError("libbpf.so.1: cannot open shared object file")

    monkeypatch.setattr(libbpf, "_lib", libbpf._Library())
    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(LibbpfMissing, match=r"install libbpf 1\.0 or newer"):
        libbpf.version()
    with pytest.raises(Refused, match=r"install libbpf 1\.0 or newer") as caught:
        loader.Kernel()
    assert caught.value.reason == "no libbpf"


def test_cgroup_file_system_that_went_away(tmp_path: Path) -> None:
    gone = Hierarchy(0, os.fspath(tmp_path / "cgroup"))
    names = attribution(Hierarchies(gone, gone))[0]
    assert (names.available, names.reason) == (False, "unreadable")
    assert "--path.cgroupfs" in names.remedy


def test_what_the_kernel_alone_knows(small: dict[str, int]) -> None:
    """A refusal with an error that stands for no cause that we know: EINVAL, for a map without
    room. It is reported as a bug, and is no other's reason."""
    small["cgroup_events"] = 0
    with pytest.raises(Refused, match="Invalid argument") as caught:
        loader.load(loader.open_file("cgroup_lifecycle"), ["cgroup_mkdir"], {})
    assert caught.value.reason == "refused by the kernel"
    assert "report this, with the output of `writeback-exporter doctor`" in caught.value.remedy

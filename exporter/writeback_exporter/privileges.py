# SPDX-License-Identifier: Apache-2.0
"""Capabilities: which of them what needs, which this process has, and giving them up.

They are the thread's (capabilities(7)): what one gives up the others still have, and a thread has
from its begin what the one that starts it had then. So the order matters: see `keep`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from writeback_exporter.features import Refused
from writeback_exporter.kernel import libbpf

if TYPE_CHECKING:
    from writeback_exporter.settings import Settings

_libc = ctypes.CDLL(None, use_errno=True)

# include/uapi/linux/capability.h, include/uapi/linux/prctl.h
_VERSION_3 = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_BITS = 64


class Capability(IntEnum):
    """Those that are of use here, as include/uapi/linux/capability.h numbers them."""

    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    SETPCAP = 8
    NET_BIND_SERVICE = 10
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    SYS_RESOURCE = 24
    PERFMON = 38
    BPF = 39

    def __str__(self) -> str:
        return f"CAP_{self.name}"


# Each of these has the right of the other, and more.
_SUBSTITUTES = {
    Capability.BPF: Capability.SYS_ADMIN,  # of which it was a part before 5.8, as PERFMON was
    Capability.PERFMON: Capability.SYS_ADMIN,
    Capability.DAC_READ_SEARCH: Capability.DAC_OVERRIDE,
}


@dataclass(frozen=True, slots=True)
class Need:
    """What a user other than root needs for a feature; root too, where another is the owner."""

    feature: str
    """As docs/security.md, whose table has all needs, names it."""
    capabilities: tuple[Capability, ...]
    after_start: Callable[[Settings], bool] | None = None
    """Whether they are needed as long as the exporter runs; None: never are."""


PROGRAMS = Need("every BPF program", (Capability.BPF, Capability.PERFMON))
LOCKED_MEMORY = Need(
    "BPF maps before 5.11, where RLIMIT_MEMLOCK is too low", (Capability.SYS_RESOURCE,)
)
MAPS = Need(
    "reading BPF maps before 5.19",
    (Capability.BPF,),
    lambda settings: _bpf_asks_for_a_right(settings.procfs),
)
TRACEFS = Need("`--sync.tracepoints`", (Capability.DAC_READ_SEARCH,))
PERF_EVENTS = Need(
    # Up to 2 CAP_PERFMON is enough. More than 2 is not the kernel's own: Debian and Ubuntu have it.
    "`--sync.tracepoints` where `kernel.perf_event_paranoid` is above 2",
    (Capability.SYS_ADMIN,),
)
RINGS = Need(
    "`io_uring`",
    (Capability.DAC_READ_SEARCH, Capability.SYS_PTRACE),
    lambda settings: "io_uring" in settings.collectors,
)
DEBUGFS = Need(
    "`bdi_debugfs`",
    (Capability.DAC_READ_SEARCH,),
    lambda settings: "bdi" in settings.collectors,
)
CONTAINERS = Need(
    "names of containers (`workload`)",
    (Capability.DAC_READ_SEARCH,),
    lambda settings: "workload" in settings.collectors,
)
PRIVATE_CGROUPS = Need(
    "cgroups that their owner keeps private (`pressure`, `cgroup_memory`, `cgroup_io`)",
    (Capability.DAC_READ_SEARCH,),
    lambda s: not s.collectors.isdisjoint(("pressure", "cgroup_memory", "cgroup_io")),
)
HOST_TRIGGERS = Need(
    "`--pressure.trigger`",
    (Capability.SYS_RESOURCE, Capability.DAC_OVERRIDE),
)
CGROUP_TRIGGERS = Need(
    "`--pressure.trigger.cgroups`",
    (Capability.SYS_RESOURCE, Capability.DAC_OVERRIDE),
    lambda settings: bool(settings.pressure_triggers and settings.pressure_trigger_cgroups),
)
WEB_CONFIG = Need(
    "`--web.config.file`, or a certificate, that others own",
    (Capability.DAC_READ_SEARCH,),
    lambda settings: settings.web_config_file is not None,
)
LOW_PORT = Need("a port below 1024", (Capability.NET_BIND_SERVICE,))
NEEDS = (
    *(PROGRAMS, LOCKED_MEMORY, MAPS, TRACEFS, PERF_EVENTS, RINGS, DEBUGFS, CONTAINERS),
    *(PRIVATE_CGROUPS, HOST_TRIGGERS, CGROUP_TRIGGERS, WEB_CONFIG, LOW_PORT),
)


NO_RIGHT = "no right"


def has(capability: Capability) -> bool:
    """Whether this thread has the capability now, or the larger one that has its right in it."""
    return _holder(capability, _Sets.of_this_thread().effective) is not None


def holds(need: Need) -> bool:
    """Whether this thread has all that is needed now."""
    return all(map(has, need.capabilities))


def refusal(detail: str, need: Iterable[Capability], otherwise: str = "do without") -> Refused:
    """Why something is refused that needs these, and how to grant those that are not there."""
    lacking = " and ".join(str(capability) for capability in need if not has(capability))
    if not lacking:
        remedy = f"allow it in the container's seccomp profile and LSM, or {otherwise}"
        return Refused(NO_RIGHT, detail, remedy)
    grant = f"grant {lacking} (systemd: AmbientCapabilities=, docker: --cap-add=)"
    root = "" if os.geteuid() == 0 else ", run it as root"
    return Refused(
        NO_RIGHT, f"{detail}: the exporter lacks {lacking}", f"{grant}{root}, or {otherwise}"
    )


def needed_after_start(settings: Settings) -> frozenset[Capability]:
    """What is needed after the start, of what this process has."""
    permitted = _Sets.of_this_thread().permitted
    needed = {
        capability
        for need in NEEDS
        if need.after_start and need.after_start(settings)
        for capability in need.capabilities
    }
    held = (_holder(capability, permitted) for capability in needed)
    return frozenset(capability for capability in held if capability is not None)


def keep(capabilities: Iterable[Capability]) -> None:
    """Gives up, in the calling thread and those that it starts from now on, all capabilities but
    these, for good: execve(2) gives none back either, whatever the file's owner or mode.

    Raises OSError where a seccomp filter denies that.
    """
    kept = _mask(capabilities) & _Sets.of_this_thread().permitted
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if has(Capability.SETPCAP):
        for number in range(_BITS):
            # What the kernel does not know cannot be read, and is not there.
            if not kept >> number & 1 and _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
                _prctl(_PR_CAPBSET_DROP, number)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _Sets(kept, kept, 0).apply()


def _holder(capability: Capability, mask: int) -> Capability | None:
    """The capability, or its substitute, whichever is in a mask."""
    either = (capability, _SUBSTITUTES.get(capability))
    return next((one for one in either if one is not None and mask >> one & 1), None)


def _mask(capabilities: Iterable[Capability]) -> int:
    return sum(1 << capability for capability in set(capabilities))


def _bpf_asks_for_a_right(procfs: str) -> bool:
    """Whether who has a map's descriptor needs CAP_BPF to read it: before 5.19 (c8644cd0efe7) where
    the sysctl is not 0, which it may become while we run. The same holds for all else that we do
    after the start: to run a program, to attach one that is loaded, to ask about it.
    """
    try:
        sysctl = Path(f"{procfs}/sys/kernel/unprivileged_bpf_disabled").read_text(encoding="ascii")
    except OSError:
        return True
    if sysctl.strip() == "0":
        return True
    sets = _Sets.of_this_thread()
    try:
        _Sets(0, sets.permitted, sets.inheritable).apply()
    except OSError:  # seccomp: then none can be given up either
        return True
    try:
        return not libbpf.may_call()
    except libbpf.LibbpfMissing:
        return False
    finally:
        sets.apply()


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {argument}): {os.strerror(error)}")


@dataclass(frozen=True, slots=True)
class _Sets:
    """A thread's, as masks."""

    effective: int
    permitted: int
    inheritable: int

    @classmethod
    def of_this_thread(cls) -> _Sets:
        # Not /proc/self/status: that is the main thread's, and no descriptor may be left for it.
        data = (ctypes.c_uint32 * 6)()
        if _libc.capget(_header(), data) < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"capget: {os.strerror(error)}")
        return cls(*(data[i] | data[i + 3] << 32 for i in range(3)))

    def apply(self) -> None:
        masks = (self.effective, self.permitted, self.inheritable)
        data = (ctypes.c_uint32 * 6)(
            *(mask & 0xFFFFFFFF for mask in masks), *(mask >> 32 for mask in masks)
        )
        if _libc.capset(_header(), data) < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"capset: {os.strerror(error)}")


def _header() -> ctypes.Array[ctypes.c_uint32]:
    """struct __user_cap_header_struct: version, and 0 for the calling thread. The kernel writes to
    it."""
    return (ctypes.c_uint32 * 2)(_VERSION_3, 0)

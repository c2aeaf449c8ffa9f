# SPDX-License-Identifier: Apache-2.0
"""Open a BPF object, choose the programs that fit this kernel, load and attach them.

A refusal is never silent and never takes another program down: it becomes a `Refused` with a short
reason (a label of writeback_exporter_feature_available) and a remedy (for the log and `doctor`).
"""

from __future__ import annotations

import errno
import os
import re
import resource
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from writeback_exporter import __version__, privileges
from writeback_exporter.features import NO_DESCRIPTOR, Refused, descriptor_remedy
from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.layout import BadObject, ObjectFile
from writeback_exporter.kernel.libbpf import BpfError, KernelBtf, LibbpfMissing, Object
from writeback_exporter.kernel.pins import PinnedObject, Pins, TakeoverError, fingerprint

OBJECTS = Path(__file__).parent.parent / "objects"
BTF = "/sys/kernel/btf/vmlinux"
LOCKDOWN = "/sys/kernel/security/lockdown"


class Kernel:
    """The running kernel as far as loading BPF depends on it."""

    def __init__(
        self,
        procfs: str = "/proc",
        syscall_tracepoints: bool = False,
        pins: Pins | None = None,
        hierarchies: Iterable[int] = (),
    ) -> None:
        """Raises Refused where no BPF program can be loaded at all.

        `syscall_tracepoints`: whether those may be used, at a cost to every system call. `pins`:
        where what is loaded stays when the exporter ends; `hierarchies`, those whose cgroups count,
        then are a part of what it is.
        """
        self.procfs = procfs
        self.syscall_tracepoints = syscall_tracepoints
        self._pins = pins
        self._hierarchies = tuple(hierarchies)
        try:
            libbpf.version()
        except LibbpfMissing as error:
            raise Refused("no libbpf", str(error), "then start the exporter again") from error
        if not privileges.holds(privileges.PROGRAMS):
            need = privileges.PROGRAMS.capabilities
            raise privileges.refusal("no BPF program can be loaded", need)
        if not os.path.exists(BTF):
            raise Refused(
                "no BTF",
                f"the kernel offers no type information ({BTF} is absent)",
                "boot a kernel built with CONFIG_DEBUG_INFO_BTF=y, as all distributions' are",
            )
        if _lockdown() == "confidentiality":
            raise _locked_down()
        try:
            self.btf = KernelBtf()
        except BpfError as error:
            raise Refused(
                "BTF unreadable", str(error), f"make {BTF} readable, or upgrade libbpf1"
            ) from error

    def close(self) -> None:
        self.btf.close()

    def load(
        self,
        file: ObjectFile,
        programs: Sequence[str],
        constants: Mapping[str, int],
        also: Sequence[str] = (),
        targets: Mapping[str, str] | None = None,
    ) -> Object | PinnedObject:
        """As the function `load`; or the same, taken over from an exporter before this one.

        Raises TakeoverError besides, where it is there and cannot be had now.
        """
        if self._pins is None:
            return load(file, programs, constants, also, targets)
        told = {"hierarchies": self._hierarchies, **constants, **(targets or {})}
        mark = fingerprint(file, [*programs, *also], told)
        loaded = [*programs, *also, *file.own_programs]
        try:
            taken = self._pins.take_over(file, mark, programs, loaded)
        except BpfError as error:
            raise TakeoverError(refusal(error)) from error
        if taken:
            return taken
        opened = load(file, programs, constants, also, targets)
        self._pins.keep(opened, mark)
        return opened

    def arity(self, tracepoint: str, known: Iterable[int]) -> int:
        """Number of a tracepoint's arguments, which must be one that we have a program for."""
        arity = self.btf.tracepoint_arity(tracepoint)
        if arity is None:
            raise Refused(
                "no tracepoint",
                f"the kernel has no tracepoint {tracepoint}",
                "use a kernel from 5.10 on, built with CONFIG_TRACEPOINTS and CONFIG_BLOCK",
            )
        if arity not in known:
            raise Refused(
                "unknown tracepoint",
                f"tracepoint {tracepoint} has {arity} arguments on this kernel, which this version "
                "does not know",
                "upgrade writeback-exporter",
            )
        return arity

    def has_function(self, name: str) -> bool:
        """Whether BTF knows a kernel function of that name: one that fentry can be attached to if
        the kernel allows it, and that was not inlined everywhere."""
        return self.btf.has_function(name)

    def require_fexit_of_sleepers(self) -> None:
        """Raises Refused where fexit of a function that sleeps is not safe: without bpf_tramp_image
        (5.12, and 5.10.262 has it) a task that sleeps in it returns to freed memory when we detach.
        """
        if not self.btf.has_struct("bpf_tramp_image"):
            raise Refused(
                "unsafe fexit",
                "this kernel would crash should the exporter end while a task sleeps in a function "
                "that fexit is attached to",
                "use a kernel from 5.12 on, or one of 5.10 that has struct bpf_tramp_image",
            )

    def has_cmpxchg(self) -> bool:
        """Whether BPF has the atomic compare-and-exchange instruction (5.12 on x86-64)."""
        try:
            libbpf.load_instructions(_SOCKET_FILTER, _CMPXCHG, "cmpxchg")
        except BpfError:
            return False
        return True


_SOCKET_FILTER = 1  # BPF_PROG_TYPE_SOCKET_FILTER: the type with the least demands
_CMPXCHG = b"".join(
    struct.pack("=BBhi", code, registers, offset, immediate)
    for code, registers, offset, immediate in (
        (0xB7, 0x00, 0, 0),  # r0 = 0
        (0x7B, 0x0A, -8, 0),  # *(u64 *)(r10 - 8) = r0
        (0xB7, 0x01, 0, 1),  # r1 = 1
        (0xDB, 0x1A, -8, 0xF1),  # r0 = cmpxchg_64(r10 - 8, r0, r1)
        (0xB7, 0x00, 0, 0),  # r0 = 0
        (0x95, 0x00, 0, 0),  # exit
    )
)


def open_file(name: str) -> ObjectFile:
    """The compiled object of bpf/NAME.bpf.c; BadObject where it is not of this version."""
    file = ObjectFile(str(OBJECTS / f"{name}.bpf.o"))
    if file.version != __version__:
        raise BadObject(
            f"{file.path} was built for version {file.version}, this is {__version__}; reinstall "
            "writeback-exporter, or run `make bpf` in its source"
        )
    return file


def load(
    file: ObjectFile,
    programs: Sequence[str],
    constants: Mapping[str, int],
    also: Sequence[str] = (),
    targets: Mapping[str, str] | None = None,
) -> Object:
    """Loads these programs of the object and attaches them in this order, all or none; those of
    `also` are loaded, to be attached later, and those that are at no hook, to be run by us. What
    sees the end of a thing comes before what sees its begin, or things that begin and end while we
    attach would never end for us. `targets`: the kernel's function for each program whose section
    names none.

    Raises Refused, with what the kernel said.
    """
    opened = None
    try:
        opened = Object(file)
        for program in opened.programs.values():
            program.autoload = program.name in (*programs, *also, *file.own_programs)
        for name, function in (targets or {}).items():
            opened.programs[name].set_target(function)
        opened.set_constants(**constants)
        opened.load()
        for name in programs:
            opened.attach(name)
        return opened
    except BpfError as error:
        if opened:
            opened.close()
        raise refusal(error) from error


def refusal(error: BpfError) -> Refused:
    """Why the kernel refused, and what to do."""
    # First: a program that the verifier has accepted, and said so, needs a descriptor still.
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Refused(NO_DESCRIPTOR, str(error), descriptor_remedy(error.errno))
    # Where securityfs is not mounted, as in most containers, only the verifier's words tell.
    if re.search(r"(unknown func|cannot use helper) bpf_probe_read", "".join(error.log)):
        return _locked_down()
    if "processed" in "".join(error.log):
        return Refused(
            "refused by the verifier",
            str(error),
            "report this, with the output of `writeback-exporter doctor`, as a bug",
        )
    if error.errno in (errno.EPERM, errno.EACCES):
        if _exceeds_locked_memory():
            kibibytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] >> 10
            return Refused(
                "no memory",
                f"{error}: maps are charged to RLIMIT_MEMLOCK, which is {kibibytes} KiB",
                "grant CAP_SYS_RESOURCE, with which the exporter raises it, or raise it (systemd: "
                "LimitMEMLOCK=infinity, docker: --ulimit memlock=-1)",
            )
        return Refused(
            "not permitted",
            str(error),
            "allow bpf(2) in the container's seccomp profile and LSM, outside a user namespace; "
            "fentry is besides missing in kernels without "
            "CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS",
        )
    if error.errno in (errno.ENOMEM, errno.E2BIG):
        return Refused(
            "no memory",
            str(error),
            "raise the memory limit of the exporter's cgroup",
        )
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return Refused("not in this kernel", str(error), "use another kernel, or do without")
    return Refused(
        "refused by the kernel",
        str(error),
        "report this, with the output of `writeback-exporter doctor`, as a bug",
    )


def _exceeds_locked_memory() -> bool:
    """Whether EPERM may be what it is before 5.11: the answer to maps beyond RLIMIT_MEMLOCK, which
    libbpf raises where it may."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return False
    if not libbpf.may_call():
        return False
    btf = KernelBtf()
    try:
        return btf.has_function("bpf_map_charge_init")
    finally:
        btf.close()


def _locked_down() -> Refused:
    return Refused(
        "lockdown",
        "the kernel is locked down for confidentiality, BPF may not read its memory",
        "boot with lockdown=integrity, or without",
    )


def _lockdown() -> str:
    try:
        text = Path(LOCKDOWN).read_text(encoding="ascii")
    except OSError:
        return "none"  # no lockdown LSM, or securityfs not mounted
    return text[text.find("[") + 1 : text.find("]")]

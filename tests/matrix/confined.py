# SPDX-License-Identifier: Apache-2.0
"""Runs a command under a systemd unit's restrictions without systemd: what it lets the kernel do.

Of what is not done nothing touches the exporter: PrivateTmp, ProtectHostname and ProtectClock give
it something of its own, LockPersonality, RestrictNamespaces, RestrictRealtime and RestrictSUIDSGID
refuse arguments of system calls that it does not make, MemoryMax and TasksMax are of its cgroup.
"""

from __future__ import annotations

import platform
import re
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

Unit = Mapping[str, Sequence[str]]
"""The values of each setting, in order."""

USER = 61184  # the first of those that DynamicUser takes


def read(*files: Path) -> Unit:
    """A unit's file and those of its drop-ins."""
    settings: dict[str, list[str]] = {}
    for file in files:
        for key, value in re.findall(r"^(\w+)=(.*)$", file.read_text(), re.MULTILINE):
            settings.setdefault(key, []).append(value)
    return settings


def mounting(unit: Unit, root: str) -> tuple[str, ...]:
    """Shell commands for `lab.with_mounts`, for the root directory there."""
    commands = []
    if unit["ProtectKernelTunables"] == ["yes"]:
        commands += [
            *(f"mount --bind {root}/proc/{name} {root}/proc/{name}" for name in _TUNABLES),
            *(f"mount -o remount,bind,ro {root}/proc/{name}" for name in _TUNABLES),
            f"touch {root}/tmp/inaccessible && chmod 0 {root}/tmp/inaccessible",
            *(
                f"{{ ! test -e {file} || mount --bind {root}/tmp/inaccessible {file}; }}"
                for file in (f"{root}/proc/kallsyms", f"{root}/proc/kcore")
            ),
        ]
    if unit["ProtectControlGroups"] == unit["ProtectKernelTunables"] == ["yes"]:
        # Also those below, debugfs, tracefs and cgroup file systems.
        commands.append(
            f"findmnt -rno TARGET | grep -x {quote(f'.*/{root}/sys.*')} | "
            'while read -r mount; do mount -o remount,bind,ro "$mount" || exit; done'
        )
    if unit["PrivateDevices"] == ["yes"]:
        commands += [
            f"mkdir {root}/tmp/dev && mount -t tmpfs tmpfs {root}/tmp/dev",
            *(f"touch {root}/tmp/dev/{name}" for name in _DEVICES),
            *(f"mount --bind /dev/{name} {root}/tmp/dev/{name}" for name in _DEVICES),
            f"mount --rbind {root}/tmp/dev {root}/dev",
        ]
    if unit["ProtectHome"] == ["yes"]:
        commands += [f"mount -t tmpfs -o mode=0 tmpfs {root}/{name}" for name in ("home", "root")]
    if unit["ProtectSystem"] == ["strict"]:
        commands.append(f"mount -o remount,bind,ro {root}")
    return tuple(commands)


_TUNABLES = ("sys", "irq", "fs", "bus")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def prefix(unit: Unit, groups: str) -> tuple[str, ...]:
    """Runs a command as the unit's user; `groups` is what `systemd-analyze syscall-filter` says."""
    assert unit["AmbientCapabilities"] == unit["CapabilityBoundingSet"]
    names = " ".join(unit["AmbientCapabilities"]).lower().replace("cap_", "+").split()
    capabilities = ",".join(["-all", *names])
    (files,) = unit["LimitNOFILE"]
    return (
        *("prlimit", f"--nofile={files}:{files}"),
        *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"),
        *(f"--{kind}={capabilities}" for kind in ("bounding-set", "inh-caps", "ambient-caps")),
        *("/usr/bin/python3", "-Ic", _FILTERED, _filter(unit, groups).hex()),
    )


_FILTERED = """
import ctypes, os, sys
program = bytes.fromhex(sys.argv[1])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER,
              ctypes.byref(Program(len(program) // 8, program)), 0, 0):
    sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
os.execvp(sys.argv[2], sys.argv[2:])
"""


# System calls -----------------------------------------------------------------------------------


def _allowed(lines: Iterable[str], groups: str) -> set[str]:
    """The names that SystemCallFilter= allows: its first line makes it a list of what is allowed,
    later ones add or, with ~, take away."""
    members: dict[str, list[str]] = {}
    for line in groups.splitlines():
        if line.startswith("@"):
            members[line] = []
        elif line.startswith("    ") and not line.strip().startswith("#"):
            next(reversed(members.values())).append(line.strip())

    def expand(name: str) -> set[str]:
        return set().union(*map(expand, members[name])) if name.startswith("@") else {name}

    allowed = expand("@default")
    for line in lines:
        named = set().union(*map(expand, line.removeprefix("~").split()))
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed


def _numbers() -> dict[str, int]:
    """Of this architecture's system calls."""
    command = ["clang", "-dM", "-E", "-include", "asm/unistd.h", "-x", "c", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    defined: dict[str, str] = dict(re.findall(r"^#define (__NR\w+) (\w+)$", macros, re.MULTILINE))
    numbers = {}
    for name, value in defined.items():
        value = defined.get(value, value)  # __NR_fcntl is __NR3264_fcntl
        if value.isdigit():
            numbers[name.removeprefix("__NR_")] = int(value)
    return numbers


# struct seccomp_data
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _AND, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _EAFNOSUPPORT = 1, 97
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_WRITE, _EXECUTE = 2, 4  # PROT_WRITE, PROT_EXEC
_Instruction = tuple[int, int, int, int]


def _filter(unit: Unit, groups: str) -> bytes:
    """The settings of system calls as a program for seccomp(2)."""
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | _EPERM)
    numbers = _numbers()
    bodies: dict[str, list[_Instruction]] = {
        name: [allow] for name in _allowed(unit["SystemCallFilter"], groups) if name in numbers
    }
    families = [getattr(socket, name) for name in unit["RestrictAddressFamilies"][0].split()]
    bodies["socket"] = [
        (_LOAD, 0, 0, _ARGUMENTS),
        *(pair for f in families for pair in ((_IF_EQUAL, 0, 1, f), allow)),
        (_RETURN, 0, 0, _ERROR | _EAFNOSUPPORT),
    ]
    if unit["MemoryDenyWriteExecute"] == ["yes"]:  # as systemd has it before 254
        protection = (_LOAD, 0, 0, _ARGUMENTS + 2 * 8)
        either = (_AND, 0, 0, _WRITE | _EXECUTE)
        both = (_IF_EQUAL, 0, 1, _WRITE | _EXECUTE)
        bodies["mmap"] = [protection, either, both, refuse, allow]
        for name in ("mprotect", "pkey_mprotect"):
            bodies[name] = [protection, (_IF_ANY_BIT, 0, 1, _EXECUTE), refuse, allow]
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _AUDIT[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name, body in bodies.items():
        program += [(_IF_EQUAL, 0, len(body), numbers[name]), *body]
    program.append(refuse)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)

# SPDX-License-Identifier: Apache-2.0
"""What stays in the kernel when the exporter ends: maps, programs and links, pinned in a BPF file
system, so that the next one goes on with the counts and none of the events is missed.

DIRECTORY/OBJECT-FINGERPRINT/{map,program,link}-NAME. The fingerprint is of all that runs in the
kernel: the object's code, maps and types, the programs that were chosen, and what they were told.
Another version of the exporter with the same BPF object takes it over; what has another fingerprint
begins anew. A directory gets its name when all is in it, so whoever finds it may rely on it.

No name has a dot in it, which bpffs reserves (bpf_lookup() in kernel/bpf/inode.c).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import BpfError, Map, Object, Program

log = logging.getLogger(__name__)

FEATURE = "bpf_pin"
_BPF_FS_MAGIC = 0xCAFE4A11  # include/uapi/linux/magic.h
_OURS = re.compile(r"(?P<object>[a-z_]+)-[0-9a-f]{16}(?P<new>-new)?")
_KINDS = ("link-", "program-", "map-")
"""In the order in which they are removed: first no program runs any more."""
_NAME_LENGTH = 15  # BPF_OBJ_NAME_LEN without its end
_libc = ctypes.CDLL(None, use_errno=True)


class PinnedObject:
    """A BPF object that an exporter before this one has loaded: what it is used for, as of Object;
    closing it leaves it as it is."""

    def __init__(
        self, file: ObjectFile, directory: str, programs: Sequence[str], also: Sequence[str]
    ) -> None:
        """`programs` must be attached, `also` loaded. Raises BpfError, or ValueError where that is
        not so."""
        self._directory = directory
        self.maps: dict[str, Map] = {}
        self.programs: dict[str, Program] = {}
        self._attached: list[str] = []
        try:
            for name in file.maps:
                self.maps[name] = self._open_map(file, name)
            names = sorted(os.listdir(directory))
            for name in names:
                kind, _, program = name.partition("-")
                if kind == "program":
                    fd = libbpf.pinned(f"{directory}/{name}")
                    self.programs[program] = Program(program, fd)
            for name in names:
                kind, _, program = name.partition("-")
                if kind == "link":
                    self._check_link(program)
                    self._attached.append(program)
            missing = {f"program-{name}" for name in {*programs, *also} - self.programs.keys()}
            missing |= {f"link-{name}" for name in set(programs) - set(self._attached)}
            if missing:
                raise ValueError(f"{min(missing)} is missing")
        except BaseException:
            self.close()
            raise

    def _open_map(self, file: ObjectFile, name: str) -> Map:
        bpf_map = Map.of_descriptor(libbpf.pinned(f"{self._directory}/map-{name}"))
        layout = file.map(name)
        sizes = [
            (layout.key.size if layout.key else bpf_map.key_size, bpf_map.key_size),
            (layout.value.size if layout.value else bpf_map.value_size, bpf_map.value_size),
        ]
        if bpf_map.name != name[:_NAME_LENGTH] or any(a != b for a, b in sizes):
            os.close(bpf_map.fd)
            raise ValueError(f"map-{name} is no such map")
        bpf_map.name = name
        return bpf_map

    def _check_link(self, program: str) -> None:
        fd = libbpf.pinned(f"{self._directory}/link-{program}")
        try:
            known = self.programs.get(program)
            if known is None or libbpf.program_of_link(fd) != known.id:
                raise ValueError(f"link-{program} is no link of program-{program}")
        finally:
            os.close(fd)

    @property
    def attached(self) -> tuple[str, ...]:
        """The programs that run now."""
        return tuple(self._attached)

    def attach(self, program: str) -> None:
        """Has the program run, if it does not already, and goes on doing so."""
        if program in self._attached:
            return
        fd = libbpf.attach(self.programs[program])
        try:
            libbpf.pin(fd, f"{self._directory}/link-{program}")
        finally:
            os.close(fd)
        self._attached.append(program)

    def close(self) -> None:
        """Gives back the descriptors; all goes on in the kernel."""
        for fd in [m.fd for m in self.maps.values()] + [p.fd for p in self.programs.values()]:
            os.close(fd)
        self.maps.clear()
        self.programs.clear()


def fingerprint(
    file: ObjectFile,
    programs: Iterable[str],
    constants: Mapping[str, int],
    targets: Mapping[str, str],
) -> str:
    """Of all that decides what runs in this kernel and what its maps hold. The kernel itself is not
    among it: none outlives its bpffs."""
    whole = (file.digest, sorted(programs), sorted(constants.items()), sorted(targets.items()))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


class Pins:
    """A directory for pins, which belongs to one exporter at a time."""

    def __init__(self, directory: str) -> None:
        """Makes the directory if need be. Raises Refused."""
        _check(directory)
        self._directory = directory
        try:
            if not os.path.isdir(directory):
                os.mkdir(directory, 0o700)
            self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _who_locks(self._lock)
            os.close(self._lock)
            raise Refused(
                "in use",
                f"another writeback-exporter{owner} has its pins in {directory}",
                "stop it, or give this one another --bpf.pin",
            ) from None
        self._kept: set[str] = set()
        self._taken: list[str] = []
        self._refused: dict[str, str] = {}

    def take_over(
        self, file: ObjectFile, mark: str, programs: Sequence[str], also: Sequence[str]
    ) -> PinnedObject | None:
        """The object as it was left under this fingerprint; None where there is none, or not all of
        it. Raises BpfError or Refused where it cannot be had now."""
        directory = f"{self._directory}/{_object(file)}-{mark}"
        if not os.path.isdir(directory):
            return None
        self._kept.add(directory)
        try:
            pinned = PinnedObject(file, directory, programs, also)
        except BpfError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise Refused(
                    "not ours",
                    str(error),
                    f"have all in {self._directory} belong to user {os.geteuid()}, or remove it",
                ) from error
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            log.warning("the pins in %s cannot be taken over: %s", directory, error)
            return None
        except ValueError as error:
            log.warning("the pins in %s cannot be taken over: %s", directory, error)
            return None
        self._taken.append(_object(file))
        return pinned

    def keep(self, opened: Object, mark: str) -> None:
        """Pins an object that was loaded anew, and removes what was pinned of it before. Where that
        is refused it is not pinned, and the feature says why."""
        name = _object(opened.file)
        directory = f"{self._directory}/{name}-{mark}"
        for path in self._ours(name):
            self._remove(path, f"{name} begins anew: another version or configuration was pinned")
        new = f"{directory}-new"
        try:
            os.mkdir(new, 0o700)
            opened.pin(new)
            os.rename(new, directory)
        except OSError as error:  # BpfError is one
            if os.path.isdir(new):
                _remove_directory(new)
            opened.stay_in(None)
            self._refused[name] = str(error)
            log.warning("%s is not pinned, so that a restart resets its counts: %s", name, error)
            return
        opened.stay_in(directory)
        self._kept.add(directory)

    def settle(self) -> None:
        """Once all is loaded: says what was taken over, and removes what nobody uses."""
        if self._taken:
            log.info("going on with the counts of the last run: %s", ", ".join(self._taken))
        for path in self._ours():
            if path not in self._kept:
                self._remove(path, "nobody uses them any more")

    @property
    def feature(self) -> Feature:
        """Whether all is pinned."""
        if not self._refused:
            return Feature(FEATURE, True)
        detail = "; ".join(f"{name}: {reason}" for name, reason in sorted(self._refused.items()))
        return Feature(
            FEATURE,
            False,
            "not all pinned",
            detail,
            "look at the reason; until then a restart resets the counts of these",
        )

    def close(self) -> None:
        """Leaves all as it is, for the next exporter."""
        os.close(self._lock)

    def _ours(self, name: str = "") -> list[str]:
        """The directories of an object, or of all."""
        found = []
        for entry in sorted(os.listdir(self._directory)):
            match = _OURS.fullmatch(entry)
            if match and name in ("", match["object"]):
                found.append(f"{self._directory}/{entry}")
            elif not match and not name and "." not in entry:  # bpffs' own have dots
                log.warning("%s/%s is none of the exporter's and stays", self._directory, entry)
        return found

    def _remove(self, path: str, why: str) -> None:
        try:
            _remove_directory(path)
        except OSError as error:
            log.warning("cannot remove the pins in %s: %s; remove them by hand", path, error)
        else:
            log.warning("removed the pins in %s: %s", path, why)


def examine(directory: str) -> Feature:
    """Whether pins can be made there, for `doctor`."""
    try:
        _check(directory)
    except Refused as refusal:
        return Feature.refused(FEATURE, refusal)
    return Feature(FEATURE, True)


def _check(directory: str) -> None:
    """Raises Refused where pins cannot be made, or not safely: whoever may write there could have
    us read his maps."""
    there = directory if os.path.isdir(directory) else os.path.dirname(os.path.abspath(directory))
    try:
        status = os.stat(there)
        magic = _file_system(there)
    except OSError as error:
        raise _unusable(directory, error) from error
    if magic != _BPF_FS_MAGIC:
        raise Refused(
            "no bpffs",
            f"{there} is not in a BPF file system",
            "mount one (mount -t bpf bpf /sys/fs/bpf), and name a directory in it with --bpf.pin",
        )
    if there == directory and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022):
        raise Refused(
            "not ours",
            f"{directory} belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:o}",
            f"have it belong to user {os.geteuid()} alone, with mode 700, or remove it",
        )
    for wrong, number in (
        (there != directory and os.path.lexists(directory), errno.ENOTDIR),
        (os.statvfs(there).f_flag & os.ST_RDONLY, errno.EROFS),
        (not os.access(there, os.R_OK | os.W_OK | os.X_OK), errno.EACCES),
    ):
        if wrong:
            raise _unusable(directory, OSError(number, os.strerror(number)))


def _unusable(directory: str, error: OSError) -> Refused:
    return Refused(
        "not usable",
        f"pins cannot be made in {directory}: {error.strerror}",
        f"have a BPF file system there that is writable, and a directory of user {os.geteuid()}'s",
    )


def _file_system(path: str) -> int:
    buffer = ctypes.create_string_buffer(256)  # struct statfs, which begins with f_type
    if _libc.statfs(os.fsencode(path), buffer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(struct.unpack_from("=L", buffer)[0])


def _who_locks(fd: int) -> str:
    """' (process N)', where /proc/locks tells."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            _, kind, _, _, process, locked, *_ = line.split()
            if kind == "FLOCK" and locked == place:
                return f" (process {process})"
    except (OSError, ValueError):
        pass
    return ""


def _object(file: ObjectFile) -> str:
    return file.name.partition(".")[0]


def _remove_directory(path: str) -> None:
    names = os.listdir(path)
    for kind in _KINDS:
        for name in names:
            if name.startswith(kind):
                os.unlink(f"{path}/{name}")
    os.rmdir(path)  # ENOTEMPTY where something is in it that is not ours

# SPDX-License-Identifier: Apache-2.0
"""What stays in the kernel when the exporter ends: maps, programs and links, pinned in a BPF file
system, so that the next one goes on with the counts and none of the events is missed.

DIRECTORY/OBJECT-FINGERPRINT/{map,program,link}-NAME. The fingerprint is of all that runs in the
kernel: the object's code, maps and types, the programs that were chosen, and what they were told.
Another version of the exporter with the same BPF object takes it over; what has another fingerprint
begins anew. A directory gets its name when all is in it, so whoever finds it may rely on it; until
then it ends in -new.

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
from collections.abc import Iterable, Mapping
from pathlib import Path

from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import BpfError, Map, Object, Program

log = logging.getLogger(__name__)

FEATURE = "bpf_pin"
_BPF_FS_MAGIC = 0xCAFE4A11  # include/uapi/linux/magic.h
_OURS = re.compile(r"[a-z_]+-[0-9a-f]{16}(-new)?")
_KINDS = ("link-", "program-", "map-")
"""In the order in which they are removed: first no program runs any more."""
_NAME_LENGTH = 15  # BPF_OBJ_NAME_LEN without its end
_libc = ctypes.CDLL(None, use_errno=True)


class TakeoverError(Exception):
    """What is pinned cannot be had now; `refusal` says why. To load it anew, in another way even,
    would be to lose its counts."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class PinnedObject:
    """A BPF object that an exporter before this one has loaded: what it is used for, as of Object;
    closing it leaves it as it is."""

    pinned = True

    def __init__(
        self, file: ObjectFile, directory: str, attached: Iterable[str], loaded: Iterable[str]
    ) -> None:
        """`attached` and `loaded`: the programs that must be. Raises BpfError, or ValueError where
        that is not so."""
        self._directory = directory
        self.maps: dict[str, Map] = {}
        self.programs: dict[str, Program] = {}
        # Open, so that the programs run as long as we do, should somebody remove the pins.
        self._links: dict[str, int] = {}
        try:
            for name in file.maps:
                self.maps[name] = self._open_map(file, name)
            for program in self._names("program-"):
                fd = libbpf.pinned(f"{directory}/program-{program}")
                self.programs[program] = Program(program, fd)
            for program in self._names("link-"):
                self._links[program] = self._open_link(program)
            missing = {f"program-{name}" for name in set(loaded) - self.programs.keys()}
            missing |= {f"link-{name}" for name in set(attached) - self._links.keys()}
            if missing:
                raise ValueError(f"{min(missing)} is missing")
        except BaseException:
            self.close()
            raise

    def _names(self, kind: str) -> list[str]:
        names = sorted(os.listdir(self._directory))
        return [name.removeprefix(kind) for name in names if name.startswith(kind)]

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

    def _open_link(self, program: str) -> int:
        fd = libbpf.pinned(f"{self._directory}/link-{program}")
        known = self.programs.get(program)
        if known is None or libbpf.program_of_link(fd) != known.id:
            os.close(fd)
            raise ValueError(f"link-{program} is no link of program-{program}")
        return fd

    @property
    def attached(self) -> tuple[str, ...]:
        """The programs that run now."""
        return tuple(self._links)

    def attach(self, program: str) -> None:
        """Has the program run, if it does not already, and goes on doing so."""
        if program in self._links:
            return
        fd = self._links[program] = libbpf.attach(self.programs[program])
        libbpf.pin(fd, f"{self._directory}/link-{program}")

    def close(self) -> None:
        """Gives back the descriptors; all that is pinned goes on in the kernel."""
        maps = (bpf_map.fd for bpf_map in self.maps.values())
        programs = (program.fd for program in self.programs.values())
        for fd in (*maps, *programs, *self._links.values()):
            os.close(fd)
        for opened in (self.maps, self.programs, self._links):
            opened.clear()


def fingerprint(file: ObjectFile, programs: Iterable[str], told: Mapping[str, object]) -> str:
    """Of all that decides what runs in this kernel and what its maps hold. The kernel itself is not
    among it: none outlives its bpffs."""
    whole = (file.digest(), sorted(programs), sorted(told.items()))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


class Pins:
    """A directory for pins, which belongs to one exporter at a time."""

    def __init__(self, directory: str) -> None:
        """Makes the directory if need be. Raises Refused."""
        self._directory = directory
        self._lock = _open(directory)
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
        self._used: set[str] = set()
        """Directories that stay."""
        self._new: list[tuple[Object, str]] = []
        """Objects that are in a directory that has not its name yet, which is this."""
        self._taken: list[str] = []
        self._refused: dict[str, str] = {}

    def take_over(
        self, file: ObjectFile, mark: str, attached: Iterable[str], loaded: Iterable[str]
    ) -> PinnedObject | None:
        """The object as it was left under this fingerprint; None where there is none, or not all of
        it. Raises BpfError or TakeoverError where it cannot be had now."""
        name = _object(file)
        directory = f"{self._directory}/{name}-{mark}"
        if not os.path.isdir(directory):
            return None
        self._used.add(directory)
        try:
            _check_owner(directory, os.stat(directory, follow_symlinks=False))
            pinned = PinnedObject(file, directory, attached, loaded)
        except Refused as refusal:
            raise TakeoverError(refusal) from refusal
        except (BpfError, ValueError) as error:
            if isinstance(error, BpfError) and error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            log.warning("the pins in %s cannot be taken over: %s", directory, error)
            self._used.remove(directory)
            return None
        self._taken.append(name)
        return pinned

    def keep(self, opened: Object, mark: str) -> None:
        """Pins an object that was loaded anew. Where that is refused it is not pinned, and the
        feature says why."""
        name = _object(opened.file)
        directory = f"{self._directory}/{name}-{mark}"
        new = f"{directory}-new"
        try:
            if os.path.isdir(new):
                self._remove(new, "an exporter ended while it started")
            os.mkdir(new, 0o700)
            opened.pin(new)
        except OSError as error:  # BpfError is one
            opened.unpin()
            self._refuse(name, new, error)
        else:
            self._new.append((opened, directory))

    def _refuse(self, name: str, new: str, error: OSError) -> None:
        self._refused[name] = str(error)
        log.warning("%s is not pinned, so that a restart resets its counts: %s", name, error)
        if os.path.isdir(new):
            self._remove(new, "it is not whole")

    def settle(self) -> None:
        """Once all is loaded, attached and made ready: gives what is new its name, removes what
        nobody uses, and says what was taken over."""
        ours = self._ours()
        for opened, directory in self._new:
            name = _object(opened.file)
            for old in ours:
                if old != f"{directory}-new" and _name_of(old) == name and old not in self._used:
                    self._remove(
                        old, f"{name} begins anew: another version or configuration was pinned"
                    )
            try:
                os.rename(f"{directory}-new", directory)
            except OSError as error:
                opened.unpin()
                self._refuse(name, f"{directory}-new", error)
            else:
                opened.pin_in(directory)
                self._used.add(directory)
        self._new.clear()
        for path in ours:
            if path not in self._used and os.path.isdir(path):
                self._remove(path, "nobody uses them any more")
        if self._taken:
            log.info("going on with the counts of the last run: %s", ", ".join(self._taken))

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

    def _ours(self) -> list[str]:
        """The directories of objects."""
        found = []
        for entry in sorted(os.listdir(self._directory)):
            path = f"{self._directory}/{entry}"
            if _OURS.fullmatch(entry):
                found.append(path)
            elif "." not in entry:  # bpffs' own have dots
                log.warning("%s is none of the exporter's and stays", path)
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
        os.close(_open(directory, make=False))
    except Refused as refusal:
        return Feature.refused(FEATURE, refusal)
    return Feature(FEATURE, True)


def _open(directory: str, make: bool = True) -> int:
    """A descriptor of the directory, which is made if need be, or else of where it would be. Raises
    Refused where pins cannot be made in it, or not safely: whoever may write there could have us
    read his maps."""
    try:
        parent = os.path.dirname(os.path.abspath(directory))
        if make and not os.path.lexists(directory) and _file_system(parent) == _BPF_FS_MAGIC:
            os.mkdir(directory, 0o700)
        there = directory if os.path.lexists(directory) else parent
        fd = os.open(there, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        if _file_system(fd) != _BPF_FS_MAGIC:
            raise Refused(
                "no bpffs",
                f"{there} is not in a BPF file system",
                "mount one (mount -t bpf -o mode=700 bpf /sys/fs/bpf), and name a directory in it "
                "with --bpf.pin",
            )
        if there == directory:
            _check_owner(directory, os.fstat(fd))
        for wrong, number in (
            (os.fstatvfs(fd).f_flag & os.ST_RDONLY, errno.EROFS),
            (not os.access(there, os.R_OK | os.W_OK | os.X_OK), errno.EACCES),
        ):
            if wrong:
                raise _unusable(directory, OSError(number, os.strerror(number)))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_owner(directory: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise Refused(
            "not ours",
            f"{directory} belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:o}",
            f"have it and all in it belong to user {os.geteuid()} alone, with mode 700, or remove "
            "it",
        )


def _unusable(directory: str, error: OSError) -> Refused:
    return Refused(
        "not usable",
        f"pins cannot be made in {directory}: {error.strerror}",
        f"have a BPF file system there that is writable, and a directory of user {os.geteuid()}'s",
    )


def _file_system(place: str | int) -> int:
    """The magic number of a path's, or a descriptor's, file system."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs, which begins with f_type
    if isinstance(place, int):
        failed = _libc.fstatfs(place, buffer)
    else:
        failed = _libc.statfs(os.fsencode(place), buffer)
    if failed:
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


def _name_of(path: str) -> str:
    """The object that one of our directories is of."""
    return os.path.basename(path).partition("-")[0]


def _remove_directory(path: str) -> None:
    names = os.listdir(path)
    for kind in _KINDS:
        for name in names:
            if name.startswith(kind):
                os.unlink(f"{path}/{name}")
    os.rmdir(path)  # ENOTEMPTY where something is in it that is not ours

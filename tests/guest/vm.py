# SPDX-License-Identifier: Apache-2.0
"""Runs a command as root on another kernel: QEMU, with the host's own userland.

The guest's root is the host's /usr, /etc, this Python and this checkout, at the same paths. A
virtiofsd in a mount namespace of its own serves them read-only; the guest lays a tmpfs over them.
/out alone is writable, and is a directory on the host. Start to end takes 4-7 s for a command
that is quick. Needs root, for the mount namespace.

    python -m tests.guest.vm --kernel 6.1 -- uname -a
"""

import argparse
import fcntl
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from writeback_exporter.kernel.loader import OBJECTS

from . import initramfs, kernels

CHECKOUT = Path(__file__).resolve().parents[2]

# Loaded before the root is there; others are in /lib/modules, for modprobe.
MODULES = ("virtio_pci", "virtio_blk", "virtiofs", "overlay", "loop")

# On the kernel's command line, with the expected release: tells a test that it is in a guest. The
# dot makes it a (non-existing) module's parameter, which the kernel accepts without a warning.
MARKER = "writeback_guest.kernel"

# TCG, for nested KVM hangs on some of the machines that run this. thread=single, for with
# thread=multi and two vCPUs switching a tracepoint on or off crashed the guest (int3 oops) in 9
# of 12 soak runs, with thread=single in none of 27. Two vCPUs nevertheless: per-CPU maps and
# migrations are then what they are elsewhere.
ACCELERATOR = "tcg,thread=single"
CPUS = 2

# Guests that this process runs at a time, others wait: each keeps one of the host's CPUs busy.
AT_ONCE = 2
_SLOTS = threading.BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True)
class Machine:
    """What QEMU and the kernel want to know about the architecture, which is the host's."""

    qemu: str
    package: str
    arguments: tuple[str, ...]
    console: str


MACHINES = {
    "x86_64": Machine(
        "qemu-system-x86_64", "qemu-system-x86", ("-machine", "pc", "-cpu", "max"), "ttyS0"
    ),
    # lpa2=off: QEMU's manual says that kernels before 5.12 do not boot with it. pauth-impdef: with
    # the architected pointer authentication 6.1 takes 11.0 s to boot and stop, with this 2.9 s.
    "aarch64": Machine(
        "qemu-system-aarch64",
        "qemu-system-arm",
        ("-machine", "virt", "-cpu", "max,lpa2=off,pauth-impdef=on"),
        "ttyAMA0",
    ),
}

# Debian 12 has the C virtiofsd in qemu-system-common, Debian 13 the Rust one as package virtiofsd.
# sandbox=chroot: the namespaces of the default sandbox are not to be had in all containers, and
# serve nothing on top of the mount namespace that we make. cache=always: the host's files do not
# change under a test, and without it each stat() is a round trip through an emulated CPU.
VIRTIOFSD = {
    # First, for Debian 13 has a link to it where Debian 12 has the other one.
    Path("/usr/libexec/virtiofsd"): (
        "--shared-dir={root}",
        "--sandbox=chroot",
        "--cache=always",
        # overlayfs does not cross mount points, and what we serve is nothing but: EREMOTE.
        "--no-announce-submounts",
        "--rlimit-nofile=0",
        "--log-level=error",
    ),
    Path("/usr/lib/qemu/virtiofsd"): (
        "-o",
        "source={root},sandbox=chroot,cache=always,log_level=err",
        "--rlimit-nofile=0",
    ),
}


class GuestError(Exception):
    """A guest that could not be started, died or took too long; with the ends of its logs."""


@dataclass(frozen=True)
class Disk:
    """An empty disk of `size` bytes, throttled by QEMU to bytes and requests per second.

    `model` is a QEMU device: "virtio-blk-pci" is /dev/vda and so on in the disks' order; "nvme"
    needs the module nvme, and 5-7 s more to boot. Their serial numbers are disk0, disk1...
    """

    size: int
    bps_write: int | None = None
    bps_read: int | None = None
    iops: int | None = None
    model: str = "virtio-blk-pci"

    def arguments(self, index: int, file: Path) -> list[str]:
        throttles = {
            "bps-write": self.bps_write,
            "bps-read": self.bps_read,
            "iops-total": self.iops,
        }
        drive = f"file={file},id=disk{index},if=none,format=raw,cache=unsafe"
        drive += "".join(f",throttling.{key}={value}" for key, value in throttles.items() if value)
        device = f"{self.model},drive=disk{index},serial=disk{index}"
        return ["-drive", drive, "-device", device]


# One that is slow to write, for writeback to be throttled, and one that is not.
DISKS = (Disk(64 << 20, bps_write=4 << 20), Disk(64 << 20))


@dataclass(frozen=True)
class Result:
    """A command that ran to its end; `seconds` from before the guest's start to after its end."""

    exit_code: int
    output: str
    console: str
    kernel_log: str
    out: Path
    seconds: float


def run(
    kernel: kernels.Kernel,
    command: str,
    *,
    out: Path,
    shares: Sequence[Path] = (),
    objects: Path | None = None,
    disks: Sequence[Disk] = DISKS,
    memory: int = 1 << 30,
    cpus: int = CPUS,
    timeout: float = 900,
    append: str = "",
    modules: Sequence[str] = (),
    count_instructions: bool = False,
    stop: threading.Event | None = None,
    root: Path | None = None,
) -> Result:
    """Run the shell command `command` in the checkout, as root, in a guest that runs `kernel`.

    `out` is an existing directory, /out in the guest. `shares` are further directories of the host
    that the guest sees read-only at the same path; `objects` has BPF objects of another compiler,
    as $GUEST_OBJECTS has for all guests. `memory` is in bytes, `timeout` in seconds. `append` goes
    to the kernel's command line, `modules` are loaded at boot besides MODULES. With
    `count_instructions` the guest's clocks go on by a nanosecond an instruction, whatever the host
    does meanwhile. `stop` ends the guest, with a GuestError.

    `root` is a root directory with systemd, which is the guest's in place of the host's userland,
    checkout, `shares` and `objects`: systemd boots it, and runs the command, in /, as a service.

    Nothing is left but the files in `out`: not after an exception either, and if this process is
    killed then the guest dies with it, and the next run removes its directory in /tmp. For that,
    call it from a thread that outlives the call. Raises GuestError.
    """
    machine = _machine()
    for name in ("command", "exit", "output", "dmesg", "uptime", "console.log"):
        (out / name).unlink(missing_ok=True)
    directory = CHECKOUT if root is None else Path("/")
    (out / "command").write_text(f"cd {shlex.quote(str(directory))} || exit\n{command}\n")
    if root is not None:
        append += " writeback_guest.init=systemd systemd.show_status=no"
    userland = _host(shares, objects) if root is None else _whole(root)
    with _SLOTS, _work_directory() as work:
        start = time.monotonic()
        initramfs.build(kernel, [*MODULES, *modules], work / "initrd")
        with (
            _virtiofsd(userland | _own(kernel, out), work, out / "virtiofsd.log") as virtiofsd,
            _process(
                [
                    *_machine_arguments(machine, memory, cpus),
                    *_boot_arguments(machine, kernel, work / "initrd", append),
                    *("-serial", f"file:{out / 'console.log'}"),
                    *("-chardev", f"socket,id=share,path={work / 'share'}"),
                    *("-device", "vhost-user-fs-pci,chardev=share,tag=host"),
                    *_disk_arguments(disks, work),
                    *(("-icount", "shift=0") if count_instructions else ()),
                ],
                out / "qemu.log",
            ) as qemu,
        ):
            failure = _wait(qemu, virtiofsd, start + timeout, timeout, stop)
    exit_code = _read(out / "exit")
    if not failure and not exit_code:
        failure = "the guest stopped before its command ended"
    if failure:
        raise GuestError(_report(f"kernel {kernel.release}: {failure}", out))
    return Result(
        exit_code=int(exit_code),
        output=_read(out / "output"),
        console=_read(out / "console.log"),
        kernel_log=_read(out / "dmesg"),
        out=out,
        seconds=time.monotonic() - start,
    )


def _machine() -> Machine:
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise GuestError(f"no guests on {platform.machine()}: only on {', '.join(MACHINES)}")
    if shutil.which(machine.qemu) is None:
        raise GuestError(f"{machine.qemu} is not there: apt-get install {machine.package}")
    # The other variant has the same path; a static program names no interpreter.
    busybox = initramfs.BUSYBOX
    if not busybox.exists() or b"/ld-linux" in busybox.read_bytes()[:4096]:
        raise GuestError(f"no static {busybox}: apt-get install busybox-static")
    return machine


def _machine_arguments(machine: Machine, memory: int, cpus: int) -> list[str]:
    return [
        machine.qemu,
        *machine.arguments,
        *("-accel", ACCELERATOR, "-smp", str(cpus)),
        *("-nodefaults", "-no-reboot", "-display", "none"),
        # virtiofsd reads and writes the guest's memory, which therefore has to be shared.
        *("-m", f"{memory >> 20}M", "-machine", "memory-backend=memory"),
        *("-object", f"memory-backend-memfd,id=memory,size={memory >> 20}M,share=on"),
    ]


def _boot_arguments(
    machine: Machine, kernel: kernels.Kernel, initrd: Path, append: str
) -> list[str]:
    # loglevel=5 shows warnings; more costs boot time, for the serial port is emulated as well.
    # panic=-1 restarts at once, which -no-reboot makes the end. Where the host lets the guest wait
    # for half a minute, the guest's kernel is not to complain of a CPU or a task that is stuck.
    line = (
        f"console={machine.console} loglevel=5 log_buf_len=4M panic=-1 "
        "rcupdate.rcu_cpu_stall_timeout=300 watchdog_thresh=60 "
        "sysctl.kernel.hung_task_timeout_secs=600 "
        f"lsm=landlock,lockdown,yama,bpf {MARKER}={kernel.release} {append}"
    )
    return ["-kernel", str(kernel.vmlinuz), "-initrd", str(initrd), "-append", line]


def _disk_arguments(disks: Sequence[Disk], work: Path) -> Iterator[str]:
    for index, disk in enumerate(disks):
        file = work / f"disk{index}"
        with open(file, "wb") as image:
            image.truncate(disk.size)
        yield from disk.arguments(index, file)


def _own(kernel: kernels.Kernel, out: Path) -> dict[Path, Path]:
    """What is in each guest beside its userland."""
    return {Path("/lib-modules"): kernel.directory / "lib/modules", Path("/out"): out}


def _whole(root: Path) -> dict[Path, Path]:
    """The directories of a root."""
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    without = {*_OWN, "tmp"}  # which systemd empties at boot
    return {Path("/", name): root / name for name in names if name not in without}


_OWN = ("dev", "proc", "run", "sys")
"""Directories of which a guest has its own."""


def _host(shares: Sequence[Path], objects: Path | None) -> dict[Path, Path]:
    """The guest's directories, parents first, and the host's that are bound there."""
    prefixes = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    resolved = [prefix.resolve() for prefix in prefixes]  # a virtualenv has links to these
    served: dict[Path, Path] = {}
    for path in sorted({Path("/usr"), Path("/etc"), CHECKOUT, *prefixes, *resolved, *shares}):
        if path.parts[1:2] in {(), *((name,) for name in _OWN)}:
            raise GuestError(f"cannot share {path} with a guest, which has its own")
        # A bind does not take the mounts below it along.
        covered = any(
            path.is_relative_to(other) and path.stat().st_dev == other.stat().st_dev
            for other in served
        )
        if not covered:
            served[path] = path
    if other := objects or os.environ.get("GUEST_OBJECTS"):
        served[OBJECTS] = Path(other)
    return served


@contextmanager
def _virtiofsd(
    served: Mapping[Path, Path], work: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A virtiofsd that waits for QEMU at `work`/share and serves what `served` describes."""
    if os.geteuid() != 0:
        raise GuestError("a guest needs root, for the mount namespace that its files come from")
    program = next((path for path in VIRTIOFSD if path.exists()), None)
    if program is None:
        raise GuestError(
            "no virtiofsd: apt-get install virtiofsd, on Debian 12 qemu-system-common "
            f"(looked for {', '.join(map(str, VIRTIOFSD))})"
        )
    root = work / "root"
    root.mkdir()
    # We listen, so that QEMU can connect at once. Also, given a path, the C virtiofsd leaves a lock
    # file for it in /run/virtiofsd, for good.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(work / "share"))
        listener.listen(1)
        arguments = [argument.format(root=root) for argument in VIRTIOFSD[program]]
        server = shlex.join([str(program), f"--fd={listener.fileno()}", *arguments])
        script = "\n".join([*_staging(root, served), f"exec {server}"])
        started = _process(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", script],
            log,
            inherited=[listener.fileno()],
        )
        with started as process:
            # Ours has to go, or a connection would wait for a virtiofsd that failed.
            listener.close()
            yield process


def _staging(root: Path, served: Mapping[Path, Path]) -> Iterator[str]:
    """Shell commands that assemble the guest's root at `root`, in a mount namespace."""
    yield "set -e"
    # virtiofsd keeps a descriptor for each file the guest knows, some thousands: a soft limit of
    # 1024 is too few, and raising the hard one, its default, needs CAP_SYS_RESOURCE.
    yield 'ulimit -n "$(ulimit -Hn)"'
    yield f"mount -t tmpfs tmpfs {shlex.quote(str(root))}"
    # Relative from here on: a mkdir -p that survived its killed shell made `root` again, outside
    # of the tmpfs, once it was removed (1 of 4 runs of a test that kills it this early).
    yield f"cd {shlex.quote(str(root))}"
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            yield f"ln -s usr/{name} {name}"
    for path, source in served.items():
        target = shlex.quote(f".{path}")
        yield f"mkdir -p {target}"
        yield f"mount --bind {shlex.quote(str(source))} {target}"
        if path != Path("/out"):
            yield f"mount -o remount,bind,ro {target}"


@contextmanager
def _process(
    command: Sequence[str], log: Path, inherited: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this context, and with this process even if that is killed."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            # Ctrl-C is for this process, which then stops the others in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the session's: a shell's children too
        process.wait()


def _wait(
    qemu: subprocess.Popen[bytes],
    virtiofsd: subprocess.Popen[bytes],
    deadline: float,
    timeout: float,
    stop: threading.Event | None,
) -> str:
    """Wait until QEMU ended, or ought to: the reason, or "" where it ended by itself."""
    while qemu.poll() is None:
        # It ends when QEMU does, with 0, and QEMU itself may take a while yet where ten processes
        # want a CPU. A guest whose virtiofsd failed would hang until the timeout.
        if virtiofsd.poll():
            try:
                qemu.wait(5)  # for the case that QEMU failed first
            except subprocess.TimeoutExpired:
                return f"virtiofsd stopped with {virtiofsd.returncode}"
        if stop and stop.is_set():
            return "stopped"
        if time.monotonic() > deadline:
            return f"not finished after {timeout:g} s"
        time.sleep(0.02)
    return f"QEMU failed with {qemu.returncode}" if qemu.returncode else ""


@contextmanager
def _work_directory() -> Iterator[Path]:
    """A locked directory in /tmp; first removes those that a killed process left, unlocked."""
    prefix = "writeback-guest."
    for stale in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # in use, or just removed by another process
            # Not one that another process has just made and will lock in a moment.
            if time.time() - stale.stat().st_mtime > 60:
                with _locked(stale):
                    shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=prefix) as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock, or raises BlockingIOError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _report(failure: str, out: Path) -> str:
    logs = [out / name for name in ("console.log", "output", "qemu.log", "virtiofsd.log")]
    return "\n".join([failure, *(f"--- end of {log}:\n{_tail(log)}" for log in logs if _tail(log))])


def _tail(path: Path, lines: int = 60) -> str:
    return "\n".join(_read(path).splitlines()[-lines:])


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command in a guest; returns its exit code, or 98 where it did not get to one."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.guest.vm", description="Run a command as root in a guest."
    )
    parser.add_argument("--kernel", default="6.1", choices=kernels.SUITES)
    parser.add_argument("--out", type=Path, help="the guest's /out (default: a temporary one)")
    parser.add_argument("--share", type=Path, action="append", default=[], metavar="DIRECTORY")
    parser.add_argument("--module", action="append", default=[], help="to load at boot")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--append", default="", help="to the kernel's command line")
    parser.add_argument("command", nargs="+", help="after --; one argument is a shell command")
    options = parser.parse_args(arguments)
    command = options.command[0] if len(options.command) == 1 else shlex.join(options.command)
    # As after Ctrl-C: clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="writeback-out.") as temporary:
        out: Path = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        try:
            kernel = kernels.fetch(options.kernel)
            result = run(
                kernel,
                command,
                out=out.resolve(),
                shares=[share.resolve() for share in options.share],
                memory=options.memory << 20,
                timeout=options.timeout,
                append=options.append,
                modules=options.module,
            )
        except (GuestError, kernels.KernelUnavailable) as error:
            print(error, file=sys.stderr)
            return 98
    sys.stdout.write(result.output)
    note = f" ({kernel.note})" if kernel.note else ""
    print(f"{kernel.release}{note}: {result.seconds:.1f} s", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())

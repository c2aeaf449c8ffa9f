# SPDX-License-Identifier: Apache-2.0
"""The command line: serve, doctor, snapshot."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from writeback_exporter import __version__, doctor, malloc, privileges
from writeback_exporter.exporter import COLLECTORS, Exporter
from writeback_exporter.features import Refused
from writeback_exporter.files.cgroup_files import KEPT_LIMIT
from writeback_exporter.kernel.layout import BadObject
from writeback_exporter.kernel.pins import Pins
from writeback_exporter.logs import FORMATS, LEVELS, set_up_logging
from writeback_exporter.metrics.exposition import negotiate, render
from writeback_exporter.names.cgroups import CgroupfsError
from writeback_exporter.names.devices import SysfsError
from writeback_exporter.names.rules import EVERY_CGROUP, CgroupRules
from writeback_exporter.settings import (
    Settings,
    cgroup_limit,
    duration,
    pressure_trigger,
    regular_expression,
    telemetry_path,
)
from writeback_exporter.web.listen import Address, ListenError
from writeback_exporter.web.policy import ConfigError
from writeback_exporter.web.server import Server
from writeback_exporter.web.status import page

log = logging.getLogger(__name__)

_USAGE, _FAILURE = 2, 1
_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status: 0, 1 where it failed, 2 where it was asked wrongly."""
    arguments = _parser().parse_args(argv)
    listen = tuple(arguments.listen or [Address.parse(":10435")])
    set_up_logging(arguments.log_level, arguments.log_format)
    settings = Settings(
        listen=None if arguments.systemd_socket else listen,
        telemetry_path=arguments.telemetry_path,
        collectors=frozenset(name for name in COLLECTORS if getattr(arguments, name)),
        procfs=arguments.procfs,
        sysfs=arguments.sysfs,
        cgroupfs=arguments.cgroupfs,
        rootfs=arguments.rootfs,
        cgroups=CgroupRules(
            arguments.cgroup_include,
            arguments.cgroup_exclude,
            tuple(arguments.cgroup_collapse),
            arguments.cgroup_limit,
        ),
        idle_timeout=arguments.idle_timeout,
        pressure_triggers=tuple(dict.fromkeys(arguments.triggers)),
        pressure_trigger_cgroups=arguments.trigger_cgroups,
        sync_tracepoints=arguments.sync_tracepoints,
        web_config_file=arguments.web_config_file,
        bpf_pin=arguments.bpf_pin,
    )
    try:
        if arguments.command == "doctor":
            return doctor.examine(settings)
        if arguments.command == "snapshot":
            return _snapshot(settings, arguments.duration, arguments.output)
        return _serve(settings)
    except (
        *(BadObject, CgroupfsError, SysfsError, ConfigError, ListenError, Refused, OSError),
    ) as error:
        print(f"writeback-exporter: {_one_line(str(error))}", file=sys.stderr)
        return _FAILURE
    except KeyboardInterrupt:
        return 128 + 2  # as a shell reports SIGINT


def _serve(settings: Settings) -> int:
    malloc.give_back()
    config_file = None
    if settings.web_config_file:
        from writeback_exporter.web.config import ConfigFile  # YAML: 5 ms of a start

        config_file = ConfigFile(settings.web_config_file)
    exporter = Exporter(settings)
    started = threading.Event()
    failures: list[Exception] = []

    def status() -> bytes:
        return page(exporter.observe(), exporter.features, settings.telemetry_path)

    server = Server(
        settings.listen,
        settings.telemetry_path,
        exporter.collect,
        status,
        started.is_set,
        config_file=config_file,
    )
    scheme = "https" if server.config.tls else "http"

    def start() -> None:
        try:
            pins = Pins(settings.bpf_pin) if settings.bpf_pin else None
            exporter.start(pins, give_up)
        except Exception as error:  # which the main thread reports
            failures.append(error)
            server.stop()
            return
        # What the start has made stays, and need not be searched for garbage at scrapes: that took
        # 10 of 100 ms with 1,000 cgroups. (A higher threshold saves no more, and let RSS grow.)
        gc.collect()
        gc.freeze()
        started.set()
        for address in server.addresses:
            log.info("listening on %s://%s%s", scheme, address, settings.telemetry_path)

    kept = privileges.needed_after_start(settings)

    def give_up() -> None:
        try:
            privileges.keep(kept)
        except OSError as error:
            log.warning(
                "capabilities that are needed no more are kept: %s; allow prctl(2) and capset(2)",
                error,
            )

    _raise_descriptor_limit()
    # The port first: where it is taken, nothing is loaded into the kernel.
    server.bind()
    # Health and readiness are answered while programs are loaded; a scrape waits for them.
    starter = threading.Thread(target=start, name="start")
    starter.start()
    # This thread serves, and starts all others that do: but for the one that loads the programs,
    # and ends, none has ever had more.
    give_up()
    try:
        server.run()
    finally:
        starter.join()
        exporter.close()
    if failures:
        raise failures[0]
    return 0


def _raise_descriptor_limit() -> None:
    # Usually 1024, which our 512 connections and our own would come near to.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * KEPT_LIMIT)), hard))


def _snapshot(settings: Settings, seconds: float, output: str) -> int:
    exporter = Exporter(settings)
    try:
        exporter.start()
        time.sleep(seconds)
        text = b"".join(render(exporter.collect(), negotiate("")))
    finally:
        exporter.close()
    if output == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    else:
        _replace(output, text)
    return 0 if doctor.main_signals(settings, exporter.features) else _FAILURE


def _replace(path: str, text: bytes) -> None:
    """Writes a file so that a reader sees the old one or the new one, and never a part."""
    directory = os.path.dirname(path) or "."
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".writeback-exporter.", dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(text)
                os.fchmod(stream.fileno(), 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def _one_line(text: str) -> str:
    """What a user gave may have newlines in it."""
    return " ".join(text.split())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="writeback-exporter",
        description="Exports, per cgroup, dirty throttling, block IO, sync calls, pressure and "
        "memory, from eBPF and the kernel's files.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "command",
        nargs="?",
        choices=("serve", "doctor", "snapshot"),
        default="serve",
        help="serve metrics over HTTP (default); doctor: say what works on this host, what does "
        "not, and what to do; snapshot: observe for a while and write the metrics once",
    )
    web = parser.add_argument_group("serve")
    where = web.add_mutually_exclusive_group()
    where.add_argument(
        "--web.listen-address",
        dest="listen",
        action="append",
        type=_checked(Address.parse),
        metavar="HOST:PORT",
        help="address to listen on, may be repeated (default :10435)",
    )
    where.add_argument(
        "--web.systemd-socket",
        dest="systemd_socket",
        action="store_true",
        help="listen on the sockets that systemd hands over, as writeback-exporter.socket has them",
    )
    web.add_argument(
        "--web.telemetry-path",
        dest="telemetry_path",
        default="/metrics",
        type=_checked(telemetry_path),
        metavar="PATH",
        help="path of the metrics (default /metrics)",
    )
    web.add_argument(
        "--web.config.file",
        dest="web_config_file",
        metavar="FILE",
        help="TLS, users and passwords, headers and a rate limit, in the format that Prometheus' "
        "exporters share; read anew when it changes (default: none of these)",
    )
    web.add_argument(
        "--bpf.pin",
        dest="bpf_pin",
        metavar="DIRECTORY",
        help="keep BPF maps and programs in this directory of a BPF file system when the exporter "
        "ends, such as /sys/fs/bpf/writeback-exporter, for the next one to go on with: a restart "
        "then misses no event and resets no counter. Removing the directory ends them (default: "
        "they end with the exporter)",
    )
    snapshot = parser.add_argument_group("snapshot")
    snapshot.add_argument(
        "--snapshot.duration",
        dest="duration",
        default=5.0,
        type=_checked(duration),
        metavar="DURATION",
        help="how long to observe (default 5s)",
    )
    snapshot.add_argument(
        "--snapshot.output",
        dest="output",
        default="-",
        metavar="FILE",
        help="write to this file, atomically, for a textfile collector (default: stdout)",
    )
    collectors = parser.add_argument_group("collectors")
    for name, collector in COLLECTORS.items():
        collectors.add_argument(
            f"--collector.{name}",
            dest=name,
            action=argparse.BooleanOptionalAction,
            default=collector.default,
            help=" ".join((collector.__doc__ or "").partition("\n\n")[0].split())
            + ("" if collector.default else " (off unless switched on)"),
        )
    cgroups = parser.add_argument_group(
        "cgroups", "Which are exported by name; what the others do counts as cgroup=other."
    )
    for name, text in (
        ("include", "only these; matched in full"),
        ("exclude", "not these; matched in full"),
    ):
        cgroups.add_argument(
            f"--cgroup.{name}",
            dest=f"cgroup_{name}",
            type=_checked(regular_expression),
            metavar="REGEX",
            help=text,
        )
    cgroups.add_argument(
        "--cgroup.collapse",
        dest="cgroup_collapse",
        action="append",
        default=[],
        type=_checked(regular_expression),
        metavar="REGEX",
        help="export what is below the matching part of the path, or below its first group, as "
        "that part; may be repeated, the first that matches counts",
    )
    cgroups.add_argument(
        "--cgroup.limit",
        dest="cgroup_limit",
        default=EVERY_CGROUP.limit,
        type=_checked(cgroup_limit),
        metavar="NUMBER",
        help=f"at most so many (default {EVERY_CGROUP.limit})",
    )
    cgroups.add_argument(
        "--series.idle-timeout",
        dest="idle_timeout",
        default=0.0,
        type=_checked(duration),
        metavar="DURATION",
        help="counters and histograms that have not changed for so long leave, until they change "
        "(default: they stay)",
    )
    pressure = parser.add_argument_group("pressure_triggers")
    pressure.add_argument(
        "--pressure.trigger",
        dest="triggers",
        action="append",
        default=[],
        type=_checked(pressure_trigger),
        metavar="'RESOURCE KIND THRESHOLD/WINDOW'",
        help="count how often tasks waited for a resource (cpu, memory, io, irq) for THRESHOLD "
        "within WINDOW: some of them or, at once, all (full); may be repeated. For example "
        "'io some 150ms/2s' (default: none)",
    )
    pressure.add_argument(
        "--pressure.trigger.cgroups",
        dest="trigger_cgroups",
        type=_checked(regular_expression),
        metavar="REGEX",
        help="set the triggers not only for the host, but for each cgroup, too, whose whole path "
        "matches, such as '/system\\.slice/.*'; to remove such a cgroup takes 10 ms more",
    )
    collectors.add_argument(
        "--sync.tracepoints",
        dest="sync_tracepoints",
        action="store_true",
        help="where the kernel refuses fentry, let collector sync use the tracepoints of system "
        "calls; while in use they make every system call of every task slower: by 10 ns, or 12 %% "
        "of getppid(2), on the machine where that was measured",
    )
    paths = parser.add_argument_group("paths")
    for name, default in (
        ("procfs", "/proc"),
        ("sysfs", "/sys"),
        ("cgroupfs", "/sys/fs/cgroup"),
        ("rootfs", "/"),
    ):
        paths.add_argument(
            f"--path.{name}",
            dest=name,
            default=default,
            metavar="DIRECTORY",
            help=f"where {name} is mounted (default {default})",
        )
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log.level", dest="log_level", choices=LEVELS, default="info")
    logs.add_argument("--log.format", dest="log_format", choices=FORMATS, default="logfmt")
    return parser


def _checked(convert: Callable[[str], _T]) -> Callable[[str], _T]:
    """A converter whose own words reach the user; of a ValueError argparse would say nothing."""

    def checked(text: str) -> _T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked

# SPDX-License-Identifier: Apache-2.0
"""The command line as users run it, and what it says where they or the host are at fault."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import writeback_exporter
from writeback_exporter import __version__, cli
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.names.cgroups import find_hierarchies
from writeback_exporter.probes.base import Probe

EXPORTER = str(Path(sys.executable).parent / "writeback-exporter")
HANG = 60
"""Seconds after which a run is taken to hang."""
FEATURES = {
    name
    for name, collector in COLLECTORS.items()
    if issubclass(collector, Probe) and collector.default
} | {"cgroup_lifecycle"}
"""Those that need a right."""

Completed = subprocess.CompletedProcess[str]


WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
"""Runs a command without capabilities. Not as another user, who may not reach our interpreter."""


def run(
    *arguments: str | bytes,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    umask: int = -1,
) -> Completed:
    return subprocess.run(
        [*prefix, EXPORTER, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG,
        umask=umask,
    )


def rightless(*arguments: str, umask: int = -1) -> Completed:
    return run(*arguments, prefix=WITHOUT_RIGHTS, umask=umask)


def refused(said: Completed, status: int) -> str:
    """The one line that a refusal is."""
    assert said.returncode == status, said.stderr
    assert said.stdout == ""
    assert re.fullmatch(r"writeback-exporter: [^\n]+\n", said.stderr), said.stderr
    return said.stderr


# Asked wrongly -----------------------------------------------------------------------------------


WRONG = [
    (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (["no-such-command"], "no-such-command"),
    (["serve", "doctor"], "doctor"),
    (["--web.listen-address"], "expected one argument"),
    (["--cgroup.include=("], "'(' is no regular expression: missing )"),
    (["--cgroup.collapse=[a"], "'[a' is no regular expression: unterminated character set"),
    (["--cgroup.limit=0"], "'0' is no number of cgroups from 1 to 100000"),
    (["--cgroup.limit=many"], "'many' is no number of cgroups from 1 to 100000"),
    (["--cgroup.limit=100001"], "from 1 to 100000"),
    (["--series.idle-timeout=1"], "'1' is no duration"),
    (["--web.listen-address=10435"], "'10435' is not HOST:PORT"),
    (["--web.listen-address=:port"], "':port' is not HOST:PORT"),
    (["--web.listen-address=:65536"], "the port is above 65535"),
    (["--web.listen-address=300.1.1.1:80"], "300.1.1.1 is not an IP address"),
    (["--web.listen-address=::1:80"], "'::1:80' is not HOST:PORT"),
    (["--web.listen-address=:1", "--web.listen-address=x"], "'x' is not HOST:PORT"),
    (["--web.listen-address=:1", "--web.systemd-socket"], "--web.systemd-socket: not allowed with"),
    (["--web.systemd-socket=yes"], "ignored explicit argument 'yes'"),
    (["--web.telemetry-path="], "'' is not a path such as /metrics"),
    (["--web.telemetry-path=metrics"], "'metrics' is not a path such as /metrics"),
    (["--web.telemetry-path=/a b"], "'/a b' is not a path such as /metrics"),
    (["--web.telemetry-path=/a?b"], "'/a?b' is not a path such as /metrics"),
    (["--web.telemetry-path=/a#b"], "'/a#b' is not a path such as /metrics"),
    (["--web.telemetry-path=/ä"], "'/ä' is not a path such as /metrics"),
    (["--web.telemetry-path=/-/healthy"], "'/-/healthy' is not a path such as /metrics"),
    (["--web.telemetry-path=//metrics"], "'//metrics' is not a path such as /metrics"),
    (["--snapshot.duration=5"], "'5' is no duration"),
    (["--snapshot.duration=-5s"], "'-5s' is no duration"),
    (["--snapshot.duration=1.5s"], "'1.5s' is no duration"),
    (["--snapshot.duration=5 s"], "'5 s' is no duration"),
    (["--snapshot.duration=\N{ARABIC-INDIC DIGIT FIVE}s"], "is no duration"),
    (["--snapshot.duration=99999999999999h"], "duration"),  # more than sleep(2) can take
    ([f"--snapshot.duration={'9' * 400}h"], "duration"),  # more than a float holds
    ([f"--snapshot.duration={'9' * 5000}h"], "duration"),  # more than Python reads
    (["--pressure.trigger=io some 150ms"], "'io some 150ms' is no pressure trigger, such as"),
    (["--pressure.trigger=io some 3s/2s"], "the threshold is not between 1ms and the window"),
    (["--pressure.trigger=io some 1s/1m"], "the window is longer than 10s"),
    (["--pressure.trigger.cgroups=("], "'(' is no regular expression: "),
    (["--log.level=loud"], "'loud'"),
    (["--log.format=xml"], "'xml'"),
    (["--collector.no_such"], "--collector.no_such"),
    (["--no-collector.no_such"], "--no-collector.no_such"),
    (["--collector.block_io=yes"], "--collector.block_io"),
    (["--web.listen=:1"], "--web.listen=:1"),
    (["--log.lev=debug"], "--log.lev=debug"),
    (["--no-collector.block"], "--no-collector.block"),
    (["--vers"], "--vers"),
    (["--one\nline"], "line"),
]


def parse(arguments: list[str]) -> tuple[argparse.Namespace | object, str, str]:
    """What the parser returns, or the status it ends with; what it writes to stdout and stderr."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            result: argparse.Namespace | object = PARSER.parse_args(arguments)
        except SystemExit as end:
            result = end.code
    return result, output.getvalue(), errors.getvalue()


PARSER = cli._parser()
USAGE = r"writeback-exporter: [^\n]+ \(see writeback-exporter --help\)\n"


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_usage(arguments: list[str], words: str) -> None:
    status, output, errors = parse(arguments)
    assert (status, output) == (2, "")
    assert re.fullmatch(USAGE, errors)
    assert words in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["no-such-command"], "no-such-command"),
        (["--web.listen-address=10435"], "'10435' is not HOST:PORT"),
        (["--web.telemetry-path=//metrics", "--web.listen-address=127.0.0.1:0"], "//metrics"),
        (["snapshot", "--snapshot.duration=99999999999999h"], "duration"),
        (["--log.lev=debug"], "--log.lev=debug"),
    ],
)
def test_usage_of_the_program(arguments: list[str], words: str) -> None:
    line = refused(rightless(*arguments), status=2)
    assert re.fullmatch(USAGE, line)
    assert words in line


FLAGS = [
    "--version",
    "--help",
    "--web.listen-address",
    "--web.systemd-socket",
    "--web.telemetry-path",
    "--web.config.file",
    "--snapshot.duration",
    "--snapshot.output",
    *(f"--{no}collector.{name}" for name in COLLECTORS for no in ("", "no-")),
    "--sync.tracepoints",
    *(f"--path.{name}" for name in ("procfs", "sysfs", "cgroupfs")),
    "--pressure.trigger",
    "--pressure.trigger.cgroups",
    "--log.level",
    "--log.format",
]
VALUES = [
    ":0",
    "[::1]:80",
    "/metrics",
    "//",
    "5s",
    "9" * 400 + "h",
    "debug",
    "json",
    "io some 150ms/2s",
    "a\nb",
    "\x00",
]


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [*FLAGS, *VALUES, "serve", "doctor", "snapshot", "-", "--", "-h", "%s"]
            ),
            st.builds("{}={}".format, st.sampled_from(FLAGS), st.sampled_from(VALUES) | st.text()),
            st.sampled_from([flag[:-1] for flag in FLAGS]),
            st.text(),
        ),
        max_size=5,
    )
)
@example([f"--snapshot.duration={'9' * 400}h"])
@example(["--no\nsuch"])
def test_any_arguments_parse_or_are_refused_in_a_line(arguments: list[str]) -> None:
    result, output, errors = parse(arguments)
    if isinstance(result, argparse.Namespace):
        assert result.command in ("serve", "doctor", "snapshot")
        assert (output, errors) == ("", "")
    elif result == 0:
        assert output.startswith(("usage: ", "writeback-exporter "))
        assert not errors
    else:
        assert (result, output) == (2, "")
        assert re.fullmatch(USAGE, errors)


@pytest.mark.parametrize("command", [[EXPORTER], [sys.executable, "-m", "writeback_exporter"]])
def test_version(command: list[str]) -> None:
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=HANG)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"writeback-exporter {__version__}\n"


def test_help() -> None:
    said = run("--help")
    assert (said.returncode, said.stderr) == (0, "")
    for flag in FLAGS:
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", said.stdout), flag
    for word in ("serve", "doctor", "snapshot", ":10435", "/sys/fs/cgroup"):
        assert word in said.stdout


# A host that is not as it should be --------------------------------------------------------------

COMMANDS = pytest.mark.parametrize(
    "command",
    [["serve", "--web.listen-address=127.0.0.1:0"], ["doctor"], ["snapshot"]],
    ids=" ".join,
)


@COMMANDS
def test_cgroup_path_that_is_none(command: list[str], tmp_path: Path) -> None:
    said = run(*command, f"--path.cgroupfs={tmp_path}")
    assert f"{tmp_path} is no cgroup file system" in refused(said, status=1)
    said = run(*command, "--path.cgroupfs=/no/such")
    assert refused(said, status=1) == (
        "writeback-exporter: cannot read the cgroup file system at /no/such: No such file or "
        "directory; mount it there, or say where it is with --path.cgroupfs\n"
    )


@COMMANDS
def test_procfs_that_is_none(command: list[str], tmp_path: Path) -> None:
    said = run(*command, f"--path.procfs={tmp_path}")
    assert "No such file or directory; mount procfs there" in refused(said, status=1)


def test_sysfs_that_is_none(tmp_path: Path) -> None:
    """By sysfs the exporter tells which disks were unplugged. In a wrong one none is plugged."""
    said = rightless("doctor", f"--path.sysfs={tmp_path}")
    assert "--path.sysfs" in refused(said, status=1)


@pytest.mark.parametrize("path", [b"/no\nsuch", b"/no/such/\xff", b"/no/such/" + b"x" * 300])
def test_odd_paths(path: bytes) -> None:
    refused(run("doctor", b"--path.cgroupfs=" + path), status=1)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        line = refused(rightless(f"--web.listen-address={address}"), status=1)
    assert f"cannot listen on {address}: Address already in use; " in line


def test_address_of_another_host() -> None:
    said = rightless("--web.listen-address=192.0.2.1:0")
    assert "cannot listen on 192.0.2.1:0: " in refused(said, status=1)


def test_one_of_two_addresses_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        arguments = ["--web.listen-address=127.0.0.1:0", f"--web.listen-address={address}"]
        assert address in refused(rightless(*arguments), status=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ": cannot be read: No such file or directory; --web.config.file must name a file"),
        ("tls_config:\n", ":1: tls_config: unknown; remove it, or choose of basic_auth_users, "),
        ("tls_server_config: {cert_file: 'a\nb', key_file: c}", " cannot be read: "),
    ],
)
def test_web_configuration_that_cannot_be_used(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "web.yml"
    if content is not None:
        path.write_text(content)
    line = refused(rightless(f"--web.config.file={path}"), status=1)
    assert line.startswith(f"writeback-exporter: {path}")
    assert words in line


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a run finds first, with PYTHONPATH."""
    source = Path(writeback_exporter.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "copy/writeback_exporter"))


@COMMANDS
def test_missing_objects(command: list[str], package: Path) -> None:
    shutil.rmtree(package / "objects")
    line = refused(run(*command, environment={"PYTHONPATH": str(package.parent)}), status=1)
    assert re.search(
        r"cannot read BPF object .*\.bpf\.o: No such file or directory; reinstall .*`make bpf`",
        line,
    )


def test_damaged_object(package: Path) -> None:
    os.truncate(package / "objects/block_io.bpf.o", 1000)
    said = run("doctor", environment={"PYTHONPATH": str(package.parent)})
    assert "block_io.bpf.o is truncated" in refused(said, status=1)


@pytest.mark.parametrize("kind", ["text", "library without functions"])
def test_unusable_libbpf(tmp_path: Path, kind: str) -> None:
    library = tmp_path / "libbpf.so.1"
    if kind == "text":
        library.write_text("no library\n")
    else:
        clang = [os.environ.get("CLANG", "clang"), "-shared", "-nostdlib", "-xc", "-"]
        subprocess.run([*clang, "-o", library], input=b"", check=True)
    said = run("doctor", environment={"LD_LIBRARY_PATH": str(tmp_path)})
    assert (said.returncode, said.stderr) == (1, "")
    assert said.stdout.count("libbpf.so.1 cannot be used") == len(FEATURES)
    assert said.stdout.count("install libbpf 1.0 or newer (Debian package libbpf1)") == len(
        FEATURES
    )
    assert said.stdout.count("[no libbpf]") == len(FEATURES)


# A user without rights ---------------------------------------------------------------------------


def test_doctor_names_what_is_missing_and_the_remedy() -> None:
    said = rightless("doctor")
    assert (said.returncode, said.stderr) == (1, "")
    found = re.findall(
        r"^NO  (\w+)\n"
        r" +why: +no BPF program can be loaded: the exporter lacks CAP_BPF and CAP_PERFMON "
        r"\[no right\]\n"
        r" +remedy: grant CAP_BPF and CAP_PERFMON \(systemd: AmbientCapabilities=, docker: "
        r"--cap-add=\)(?:, run it as root)?, or do without$",
        said.stdout,
        re.MULTILINE,
    )
    assert sorted(found) == sorted(FEATURES)
    assert said.stdout.startswith(f"writeback-exporter {__version__} on Linux ")
    assert "\nMain signals are missing." in said.stdout
    hierarchies = find_hierarchies("/sys/fs/cgroup", "/proc")
    assert f"block IO is charged in {hierarchies.io.mount}\n" in said.stdout
    assert f"throttled tasks are named by {hierarchies.task.mount}\n" in said.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can keep one capability")
@pytest.mark.parametrize(("kept", "missing"), [("bpf", "CAP_PERFMON"), ("perfmon", "CAP_BPF")])
def test_doctor_names_the_one_that_is_missing(kept: str, missing: str) -> None:
    prefix = ["setpriv", f"--bounding-set=-all,+{kept}", "--inh-caps=-all"]
    said = run("doctor", prefix=prefix)
    assert (said.returncode, said.stderr) == (1, "")
    assert said.stdout.count(f"the exporter lacks {missing} [no right]") == len(FEATURES)


def refused_features(report: str) -> set[str]:
    """Those that doctor says are refused for want of the right to load BPF programs."""
    pattern = r"^NO  (\w+)\n +why: +no BPF program .*\[no right\]$"
    return set(re.findall(pattern, report, re.MULTILINE))


def test_collectors_are_switched() -> None:
    off, on = "--no-collector.block_io", "--collector.block_io"
    assert refused_features(rightless("doctor", off).stdout) == FEATURES - {"block_io"}
    assert refused_features(rightless("doctor", off, on).stdout) == FEATURES


def refused_in_metrics(text: str) -> set[str]:
    """Features that the metrics say are not available for want of a right."""
    return {
        sample.labels["feature"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "writeback_exporter_feature_available"
        and (sample.labels["reason"], sample.value) == ("no right", 0.0)
    }


def test_snapshot_without_rights() -> None:
    said = rightless("snapshot", "--snapshot.duration=1ms", "--log.format=json")
    assert said.returncode == 1
    assert refused_in_metrics(said.stdout) == FEATURES
    assert f'version="{__version__}"' in said.stdout
    records = [json.loads(line) for line in said.stderr.splitlines()]
    (error,) = (record for record in records if record["level"] == "ERROR")
    assert "CAP_BPF and CAP_PERFMON" in error["msg"]


def test_snapshot_to_a_file(tmp_path: Path) -> None:
    output = tmp_path / "writeback.prom"
    output.write_text("what was there before")
    arguments = ("snapshot", "--snapshot.duration=0s", f"--snapshot.output={output}")
    said = rightless(*arguments, umask=0o077)
    assert (said.returncode, said.stdout) == (1, "")
    assert refused_in_metrics(output.read_text()) == FEATURES
    assert [*tmp_path.iterdir()] == [output], "no temporary file is left"
    assert stat.S_IMODE(output.stat().st_mode) == 0o644


def test_snapshot_to_a_file_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for output, answer in (
        (tmp_path / "no/such", "No such file or directory"),
        (tmp_path / "directory", "Is a directory"),
    ):
        arguments = ("snapshot", "--snapshot.duration=0s", f"--snapshot.output={output}")
        said = rightless(*arguments)
        assert (said.returncode, said.stdout) == (1, "")
        last = said.stderr.splitlines()[-1]
        assert last == f"writeback-exporter: cannot write {output}: {answer}"
        assert "Traceback" not in said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


class Process:
    """The exporter in the background."""

    def __init__(self, *arguments: str) -> None:
        # A shell without job control starts what it has in the background with SIGINT ignored.
        command = ["env", "--default-signal=INT", *WITHOUT_RIGHTS, EXPORTER, *arguments]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
        self.said = ""

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()

    def wait_for(self, pattern: str) -> str:
        """The first group of a line of its log."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.said += line
            if match := re.search(pattern, line):
                return match[1]
        raise AssertionError(f"it ended: {self.said}")

    def end(self, number: signal.Signals) -> int:
        """Its status after the signal."""
        self.popen.send_signal(number)
        _, rest = self.popen.communicate(timeout=HANG)
        self.said += rest
        return self.popen.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_without_rights(number: signal.Signals) -> None:
    """It says what is missing rather than be missing itself."""
    with Process("--web.listen-address=127.0.0.1:0", "--web.telemetry-path=/m") as process:
        address = process.wait_for(r"listening on (http://127\.0\.0\.1:\d+)/m\b")

        def fetch(path: str) -> str:
            with urllib.request.urlopen(address + path, timeout=HANG) as response:
                text: str = response.read().decode()
            return text

        assert refused_in_metrics(fetch("/m")) == FEATURES
        assert fetch("/-/healthy") == "ok\n"
        assert fetch("/-/ready") == "ready\n"
        assert fetch("/").count("no right") == len(FEATURES)
        assert process.end(number) == 0
    assert "Traceback" not in process.said
    assert "CAP_BPF and CAP_PERFMON" in process.said


def test_interrupted_snapshot() -> None:
    with Process("snapshot", "--snapshot.duration=10m") as process:
        process.wait_for("(no BPF)")
        assert process.end(signal.SIGINT) == 128 + signal.SIGINT
    assert "Traceback" not in process.said


def test_log_level() -> None:
    arguments = ("snapshot", "--snapshot.duration=0s", "--web.listen-address=:0")
    said = rightless(*arguments, "--log.level=error")
    assert re.fullmatch(r'time=\S+Z? level=ERROR msg="no BPF: [^\n]+"\n', said.stderr)


def test_what_no_start_without_a_web_configuration_waits_for() -> None:
    code = "import sys, writeback_exporter.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "writeback_exporter.web.server" in loaded
    assert loaded.isdisjoint({"yaml", "bcrypt"})

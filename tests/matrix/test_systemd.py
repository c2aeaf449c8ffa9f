# SPDX-License-Identifier: Apache-2.0
"""The Debian package where systemd is init: installed, restarted, hardened, pinned and removed.

The guest goes through STEPS once, in order, and the tests look at what each said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.guest import kernels, vm
from tests.guest.vm import CHECKOUT
from tests.lab import DIRECT_WRITER, Scrape, only

from . import releases

KERNELS = {"bookworm": "6.1", "trixie": "6.12"}
UNIT = "writeback-exporter"
STATE = f"systemctl show {UNIT} -p ActiveState,SubState,Result,ExecMainStatus,NRestarts,User"
DROP_INS = "/etc/systemd/system/writeback-exporter.service.d"
OURS = "find / /run -xdev -path /out -prune -o -path '*writeback?exporter*' -print"

SCRAPE = """
import sys, time, urllib.error, urllib.request
while True:
    try:
        with urllib.request.urlopen("http://127.0.0.1:10435/metrics", timeout=120) as answer:
            print(answer.read().decode())
        break
    except urllib.error.URLError as error:
        if sys.argv[1] == "once" or not isinstance(error.reason, ConnectionRefusedError):
            raise
        time.sleep(0.5)
"""
"""Waits for a port that nobody listens on yet, unless it is to ask once."""

PROBE = """
import ctypes, os, sys
directory = sys.argv[1]
path = f"{directory}/map".encode()
libbpf = ctypes.CDLL("libbpf.so.1", use_errno=True)
libbpf.bpf_map_create.argtypes = [ctypes.c_int, ctypes.c_char_p, *[ctypes.c_uint32] * 3,
                                  ctypes.c_void_p]
libbpf.bpf_map_update_elem.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
                                       ctypes.c_uint64]
def answer(result):
    if result < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    return result
if os.path.exists(path):
    descriptor = answer(libbpf.bpf_obj_get(path))
else:
    array = 2  # BPF_MAP_TYPE_ARRAY
    descriptor = answer(libbpf.bpf_map_create(array, b"probe", 4, 8, 1, None))
    answer(libbpf.bpf_obj_pin(descriptor, path))
key, starts = ctypes.c_uint32(0), ctypes.c_uint64()
answer(libbpf.bpf_map_lookup_elem(descriptor, ctypes.byref(key), ctypes.byref(starts)))
starts.value += 1
answer(libbpf.bpf_map_update_elem(descriptor, ctypes.byref(key), ctypes.byref(starts), 0))
status = os.stat(directory)
try:
    seen = os.listdir("/sys/fs/bpf")
except PermissionError:
    seen = "closed"
print("probe", starts.value, os.getuid(), status.st_uid, oct(status.st_mode & 0o7777), seen)
"""
"""Counts its starts in a pinned map."""

QUICK = f"echo \"ARGS='{' '.join(only('host_memory'))}'\" >/etc/default/{UNIT}"
"""Has it load next to nothing at its next start, for that takes a while in an emulated machine."""
TRIGGER = "io some 100ms/500ms"
STEPS = {
    "install": "dpkg --install /out/package.deb",
    "scrape": "python3 -I /out/scrape.py patient",
    "write": "python3 -I /out/write.py /dev/vdb 4096 7 0",
    "count": "python3 -I /out/scrape.py once",
    "state": f"""
        systemctl is-enabled {UNIT}.service {UNIT}.socket || true
        {STATE}
        pid=$(systemctl show -P MainPID {UNIT})
        cat /proc/$pid/status
        stat -c 'owner %u %a %F' /sys/fs/bpf/{UNIT}
        grep /run/{UNIT} /proc/$pid/mountinfo
        stat -fc 'type %T' /proc/$pid/root/run/{UNIT}/bpf
    """,
    "journal": f"journalctl -u {UNIT} -t {UNIT} -o cat",
    "score": f"systemd-analyze security {UNIT}",
    # The unit's own settings under another name, for the exporter takes only its own pins.
    "pin": f"""
        cp /out/probe.py /usr/local/lib  # /out is root's
        sed -e '/^Restart/d; s,^ExecStart=.*,ExecStart=/usr/bin/python3 -I PROBE,' \\
            -e 's,PROBE,/usr/local/lib/probe.py /run/{UNIT}/bpf\\nType=oneshot,' \\
            -e 's,{UNIT},pin-probe,g' /lib/systemd/system/{UNIT}.service \\
            >/run/systemd/system/pin-probe.service
        systemctl daemon-reload
        systemctl start pin-probe
        systemctl start pin-probe
        mkdir /run/systemd/system/pin-probe.service.d
        echo '[Service]\\nUser=somebody-else' >/run/systemd/system/pin-probe.service.d/user.conf
        systemctl daemon-reload
        systemctl start pin-probe
        journalctl -u pin-probe -o cat
        rm -r /run/systemd/system/pin-probe.service* /sys/fs/bpf/pin-probe
        systemctl daemon-reload
    """,
    "kill": f"""
        systemctl kill -s KILL {UNIT}
        python3 -I /out/write.py /dev/vdb 4096 5 0
        until [ $(systemctl show -P NRestarts {UNIT}) = 1 ] && systemctl is-active {UNIT}; do
            sleep 0.5
        done
        {STATE}
    """,
    "count-on": "python3 -I /out/scrape.py patient",
    "journal-on": f"journalctl -u {UNIT} -t {UNIT} -o cat",
    "stop": f"""
        {QUICK}
        systemctl stop {UNIT}
        {STATE}
        ls -d /sys/fs/bpf/{UNIT}
        ls -d /run/{UNIT} || true
    """,
    "wrong": f"""
        echo ARGS=--no-such-flag >/etc/default/{UNIT}
        systemctl start {UNIT} || true
        while systemctl show -P SubState {UNIT} | grep -xE 'start|start-pre|running'; do
            sleep 0.5
        done
        {STATE}
        journalctl -u {UNIT} -t {UNIT} -o cat | tail -n 1
    """,
    "socket": f"""
        mkdir {DROP_INS}
        cp /usr/share/doc/{UNIT}/examples/socket.conf {DROP_INS}
        systemctl daemon-reload
        systemd-analyze security {UNIT}
    """,
    # All drop-ins at once.
    "more": f"""
        echo "ARGS=\\"--sync.tracepoints --pressure.trigger='{TRIGGER}'\\"" >/etc/default/{UNIT}
        cp /usr/share/doc/{UNIT}/examples/*.conf {DROP_INS}
        systemctl daemon-reload
        systemctl enable {UNIT}.socket
        systemctl restart {UNIT}
        {STATE}
        readlink /proc/1/ns/net /proc/$(systemctl show -P MainPID {UNIT})/ns/net
    """,
    "wait": "python3 -I /out/scrape.py once",
    "rights": f"cat /proc/$(systemctl show -P MainPID {UNIT})/status",
    "upgrade": f"""
        {QUICK}
        dpkg --install /out/package.deb
        systemctl is-active {UNIT}.service {UNIT}.socket
        ls -d /sys/fs/bpf/{UNIT}
    """,
    "purge": f"""
        rm -r {DROP_INS}
        dpkg --purge {UNIT}
        systemctl list-units --all --no-legend '{UNIT}*'
        ls -A /sys/fs/bpf /run/systemd/dynamic-uid
        {OURS}
    """,
}


@dataclass(frozen=True)
class Step:
    """What a step wrote, and its exit status."""

    output: str
    status: int

    def values(self, name: str) -> list[str]:
        """Of `name=value` or `name: value`, in order."""
        return re.findall(rf"^{name}[=:]\s*(.*)$", self.output, re.MULTILINE)


@pytest.fixture(scope="module")
def steps(
    clean: releases.Release, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Step]:
    out = tmp_path_factory.mktemp(clean.name)
    (out / "package.deb").write_bytes(package.read_bytes())
    writer = f"import os, sys\narguments = sys.argv[1:]\n{DIRECT_WRITER}"
    for name, text in (("scrape", SCRAPE), ("probe", PROBE), ("write", writer)):
        (out / f"{name}.py").write_text(text)
    for name, text in STEPS.items():
        (out / f"{name}.sh").write_text(text)
    each = "sh -eu /out/$step.sh >/out/$step.output 2>/out/$step.errors; echo $? >/out/$step.status"
    command = f"for step in {' '.join(STEPS)}; do {each}; done"
    vm.run(kernels.fetch(KERNELS[clean.name]), command, out=out, root=clean.root, timeout=1800)
    made = {}
    for name in STEPS:
        made[name] = Step(
            (out / f"{name}.output").read_text(), int((out / f"{name}.status").read_text())
        )
        assert made[name].status == 0, f"{name}: {(out / f'{name}.errors').read_text()}"
    return made


def test_it_serves_once_installed(steps: dict[str, Step]) -> None:
    scrape = Scrape(steps["scrape"].output)
    successes = scrape.select("exporter_collector_success")
    assert successes
    assert set(successes.values()) == {1}
    for feature in ("dirty_throttle", "block_io"):
        assert scrape.sum("exporter_feature_available", feature=feature) == 1


def test_it_counts_block_io(steps: dict[str, Step]) -> None:
    counted = Scrape(steps["count"].output) - Scrape(steps["scrape"].output)
    labels = {"device": "vdb", "op": "write"}
    assert counted.sum("block_io_device_seconds_count", **labels) == 7
    assert counted.sum("block_io_size_bytes_sum", **labels) == 7 * 4096


def test_it_runs_as_nobody_in_particular(steps: dict[str, Step]) -> None:
    """A dynamic user, under a filter of system calls, who had two capabilities and has given them
    up."""
    state = steps["state"]
    assert state.output.splitlines()[:2] == ["enabled", "disabled"]
    (users,) = state.values("Uid")
    (user,) = set(users.split())
    assert 61184 <= int(user) <= 65519  # systemd's range of dynamic users
    two = f"{1 << 39 | 1 << 38:016x}"  # CAP_BPF, CAP_PERFMON
    assert state.values("CapBnd") == [two]
    assert {*state.values("Cap(?:Prm|Eff|Amb)")} == {"0" * 16}
    assert state.values("NoNewPrivs") == ["1"]
    assert state.values("Seccomp") == ["2"]


def test_it_has_a_directory_in_bpffs(steps: dict[str, Step]) -> None:
    state = steps["state"].output
    (user,) = set(steps["state"].values("Uid")[0].split())
    assert f"owner {user} 700 directory" in state
    assert "type bpf_fs" in state
    assert re.search(rf" /{UNIT} /run/{UNIT}/bpf rw,.* - bpf bpf ", state)


def test_pins_outlive_restarts_and_users(steps: dict[str, Step]) -> None:
    said = re.findall(r"^probe (\d+) (\d+) (\d+) (\w+) (.*)$", steps["pin"].output, re.MULTILINE)
    counts, users, owners, modes, seen = zip(*said, strict=True)
    assert counts == ("1", "2", "3")
    assert users[0] == users[1] != users[2]
    assert users == owners
    assert (set(modes), set(seen)) == ({"0o700"}, {"closed"})


def test_the_journal_has_its_lines(steps: dict[str, Step]) -> None:
    lines = steps["journal"].output.splitlines()
    assert any('msg="listening on http://[::]:10435/metrics"' in line for line in lines)
    assert all(line.startswith("time=") for line in lines)


@pytest.mark.parametrize(
    ("step", "words"),
    [("score", r"`systemd-analyze security` gives\s+it"), ("socket", r"with it\s+the score is")],
)
def test_the_score_is_the_documented_one(steps: dict[str, Step], step: str, words: str) -> None:
    (score,) = re.findall(r"Overall exposure level for .*: ([0-9.]+)", steps[step].output)
    text = (CHECKOUT / "docs/installation.md").read_text()
    assert re.findall(rf"{words} ([0-9]+\.[0-9]+)", text) == [score]


def test_it_is_started_again_after_it_was_killed_and_counts_on(steps: dict[str, Step]) -> None:
    assert steps["kill"].values("ActiveState") == ["active"]
    counted = Scrape(steps["count-on"].output) - Scrape(steps["scrape"].output)
    assert counted.sum("block_io_device_seconds_count", device="vdb", op="write") == 12
    assert "going on with the counts of the last run: " in steps["journal-on"].output
    assert (
        Scrape(steps["count-on"].output).sum("exporter_feature_available", feature="bpf_pin") == 1
    )


def test_it_stops_and_leaves_its_pins(steps: dict[str, Step]) -> None:
    stop = steps["stop"]
    assert (stop.values("ActiveState"), stop.values("Result")) == (["inactive"], ["success"])
    assert stop.output.splitlines()[-1] == f"/sys/fs/bpf/{UNIT}"


def test_it_is_not_started_again_where_it_was_asked_wrongly(steps: dict[str, Step]) -> None:
    wrong = steps["wrong"]
    assert (wrong.values("ActiveState"), wrong.values("SubState")) == (["failed"], ["failed"])
    assert (wrong.values("ExecMainStatus"), wrong.values("NRestarts")) == (["2"], ["0"])
    assert "unrecognized arguments: --no-such-flag" in wrong.output.splitlines()[-1]


def test_drop_ins_give_what_they_are_for(steps: dict[str, Step]) -> None:
    before, after = Scrape(steps["scrape"].output), Scrape(steps["wait"].output)
    # BPF, PERFMON, DAC_READ_SEARCH, SYS_PTRACE, SYS_RESOURCE, DAC_OVERRIDE; it keeps what it needs
    # at each scrape.
    granted, kept = (
        sum(1 << number for number in numbers) for numbers in ((39, 38, 2, 19, 24, 1), (2, 19))
    )
    assert steps["rights"].values("CapBnd") == [f"{granted:016x}"]
    assert steps["rights"].values("CapEff") == [f"{kept:016x}"]
    assert before.sum("exporter_feature_available", feature="bdi_debugfs") == 0
    assert after.sum("exporter_feature_available", feature="bdi_debugfs") == 1
    assert after.sum("exporter_feature_available", feature="pressure_triggers") == 1
    assert set(after.select("exporter_collector_success").values()) == {1}


def test_socket_is_all_the_network_that_the_service_has(steps: dict[str, Step]) -> None:
    """And a connection waits while it starts: step `wait` asked once, as soon as it was told to."""
    networks = re.findall(r"^net:\[\d+\]$", steps["more"].output, re.MULTILINE)
    assert len(set(networks)) == 2


def test_an_upgrade_keeps_pins_and_sockets(steps: dict[str, Step]) -> None:
    assert steps["upgrade"].output.splitlines()[-3:] == ["active", "active", f"/sys/fs/bpf/{UNIT}"]


def test_a_purge_leaves_nothing(steps: dict[str, Step]) -> None:
    rest = steps["purge"].output.partition("Purging configuration files")[2].splitlines()[1:]
    assert rest == ["/run/systemd/dynamic-uid:", "", "/sys/fs/bpf:"]

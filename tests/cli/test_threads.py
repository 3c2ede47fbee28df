"""The commands choose how many threads there are and how they wait, unless the user did; importing chooses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from budgetformer.cli import process

PRINT = """
import json, os, sys
import budgetformer, budgetformer.cli
before = dict(os.environ)
assert "torch" not in sys.modules
from budgetformer.cli import process
process.set_environment()
names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
print(json.dumps([[variables.get(name) for name in names] for variables in (before, dict(os.environ))]))
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [None, None, None]),
        ({"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}, ["ACTIVE", None, "3"]),
        ({"GOMP_SPINCOUNT": "5"}, [None, "5", None]),
    ],
)
def test_importing_changes_nothing_and_a_command_what_is_not_set(
    variables: dict[str, str], expected: list[str | None]
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    code = PRINT.replace("process.set", "os.cpu_count = process.available_cpus; process.set")  # no quota, no affinity
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**inherited, **variables})
    assert json.loads(done.stdout) == [[variables.get(name) for name in names], expected], done.stderr


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in chosen})


@pytest.mark.usefixtures("nothing_chosen")
def test_without_a_measure_of_contention_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    process.set_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.usefixtures("nothing_chosen")
def test_however_many_commands_run_one_thread_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(process, "_spin_only_when_alone", lambda: started.append("watching"))
    process._watch_contention.cache_clear()
    for _ in range(3):
        process.set_environment()
    process._watch_contention.cache_clear()
    assert started == ["watching"]
    os.environ["OMP_NUM_THREADS"] = "1"  # nothing waits
    process.set_environment()
    assert started == ["watching"]


def test_threads_sleep_while_others_want_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, contended = [0.0] * process._CALM_CHECKS, [1.0]
    waits = iter([*calm, *contended, *calm[1:], *contended, *calm, *calm, *contended, *calm])
    total, held, log = 0.0, [], []

    def waiting() -> float:
        nonlocal total
        log.append(sum(not release.is_set() for release in held))
        try:
            total += next(waits)
        except StopIteration:
            raise SystemExit from None  # ends the thread
        return total

    monkeypatch.setattr(process, "_waiting_for_a_core", waiting)
    monkeypatch.setattr(process, "_hold_idle_team", held.append)
    with pytest.raises(SystemExit):
        process._spin_only_when_alone(interval=0.0001)
    checks = process._CALM_CHECKS
    # One team at a time, from the first contention until as many checks without any have followed the last.
    assert log == [0] * (checks + 1) + [1] * (2 * checks) + [0] * (checks + 1) + [1] * checks + [0]


@pytest.mark.parametrize("torch", [None, "absent"])
def test_without_torch_there_is_no_team_to_hold(torch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch is None:
        monkeypatch.setitem(sys.modules, "torch", None)  # its import is blocked
    else:
        monkeypatch.delitem(sys.modules, "torch")
    waits, held = iter([0.0, 1.0, 2.0]), []
    monkeypatch.setattr(process, "_waiting_for_a_core", lambda: next(waits))
    monkeypatch.setattr(process, "_hold_idle_team", held.append)
    with pytest.raises(StopIteration):
        process._spin_only_when_alone(interval=0.0001)
    assert held == []


IDLE = """
import sys, threading, time
import torch
from budgetformer.cli import process

torch.set_num_threads(2)
def busy():
    began = time.process_time()
    for _ in range(150):
        torch.zeros(2**17).add_(1)
        time.sleep(0.002)
    return time.process_time() - began
spinning = busy()
release = threading.Event()
holder = threading.Thread(target=process._hold_idle_team, args=(release,))
holder.start()
time.sleep(0.2)
sleeping = busy()
release.set()
holder.join()
print(spinning, sleeping, busy())
"""


@pytest.mark.skipif(sys.platform != "linux" or process.available_cpus() < 2, reason="needs libgomp and two cores")
def test_an_idle_team_lets_threads_sleep_and_its_end_lets_them_spin() -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=True, env=variables)
    spinning, sleeping, again = map(float, done.stdout.split())
    assert sleeping < 0.5 * spinning
    assert sleeping < 0.5 * again


def groups(root: Path, own: str, **files: str) -> Path:
    """A root directory whose control groups say so."""
    for name, text in {"proc/self/cgroup": own, **{name.replace("__", "/"): t for name, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),  # a container sees its own group as the top
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),  # of the group above
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        (
            "4:memory:/x\n2:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("2:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("0::/\n", {"cpu.max": "nonsense"}, 8),
        ("0::/gone\n", {}, 8),
    ],
)
def test_a_quota_limits_the_processors(
    own: str, files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root = groups(tmp_path, own, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert process.available_cpus(root) == cpus


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert process.available_cpus(tmp_path) == 2


@pytest.mark.parametrize(("tokens", "width", "threads"), [(16 * 64, 64, 1), (64 * 256, 128, 4)])
def test_small_models_train_on_one_thread(
    tokens: int, width: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [4]
    monkeypatch.setattr("torch.set_num_threads", lambda number: chosen.append(number))
    monkeypatch.setattr(process, "_CHOSEN_BY_USER", False)
    process.set_training_threads(tokens, width)
    assert chosen[-1] == threads
    monkeypatch.setattr(process, "_CHOSEN_BY_USER", True)
    process.set_training_threads(1, 1)
    assert chosen[-1] == threads


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
@pytest.mark.parametrize(
    ("variables", "keeps"),
    [({}, True), ({"MALLOC_MMAP_MAX_": "65536"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}, False)],
)
def test_training_keeps_freed_memory_unless_the_user_has_said_how(variables: dict[str, str], keeps: bool) -> None:
    code = """
import resource
from pathlib import Path
import numpy
from budgetformer.cli import process
pages = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before, said = pages(), process.keep_freed_memory()
large = numpy.ones(2**27, numpy.uint8)
del large
print(said, pages() - before > 2**26)
"""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**outer, **variables})
    assert done.stdout.split() == [str(keeps)] * 2, done.stderr

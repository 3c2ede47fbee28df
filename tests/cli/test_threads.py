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
        ({}, ["PASSIVE", None, None]),
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

"""What it takes to serve an export without torch: installed size, cold start, memory; torch beside it.

    python benchmarks/runtime.py [--run RUN --export EXPORT] [--times 5] [--venv DIR] [--json]

Makes a virtual environment with requirements-runtime.txt alone (or takes the one in DIR), starts `budgetformer serve`
there with the export and here with the run, in turns, and asks each for one answer. Cold start is from the start of the
process to that answer, with the processor's time beside it, which is the same on a busy machine; memory is the
process's resident set then. Sizes are of the files that pip installed. Without RUN an untrained model is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from serving import make_run

ROOT = Path(__file__).parents[1]
# Run by either Python: the sizes, in bytes, of distributions and all that they require.
_SIZES = """
import json, re, sys
from importlib.metadata import PackageNotFoundError, distribution
todo, sizes = sys.argv[1:], {}
while todo:
    name = re.match(r"[\\w.-]+", todo.pop())[0].lower().replace("_", "-")
    if name in sizes:
        continue
    try:
        package = distribution(name)
    except PackageNotFoundError:  # for another system
        continue
    sizes[name] = sum(f.locate().stat().st_size for f in package.files or () if f.locate().is_file())
    todo += [line for line in package.requires or () if "extra ==" not in line]
print(json.dumps(sizes))
"""


def make_venv(folder: Path) -> Path:
    """A virtual environment with the runtime's requirements and this package. -> its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", str(ROOT / "requirements-runtime.txt")], check=True)
        subprocess.run([*install, "--no-deps", str(ROOT)], check=True)
    return python


def runtime_packages() -> list[str]:
    """The names in requirements-runtime.txt."""
    lines = (ROOT / "requirements-runtime.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def installed(python: str | Path, packages: list[str]) -> float:
    """The megabytes that packages take there, with what they require."""
    done = subprocess.run([str(python), "-c", _SIZES, *packages], check=True, capture_output=True, text=True)
    return float(sum(json.loads(done.stdout).values())) / 1e6


def start(python: str | Path, model: Path) -> dict[str, float]:
    """Serve a model until its first answer."""
    began = time.perf_counter()
    program = "from budgetformer.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or str(python) == sys.executable}
    words = [str(python), "-c", program, "serve", str(model), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd=model.parent) as service:
        assert service.stderr is not None
        line = service.stderr.readline()
        if not (url := re.search(r"at (http://\S+)", line)):
            sys.exit(line + service.stderr.read())
        _ask(f"{url[1]}/predict")
        seconds = time.perf_counter() - began
        status = Path(f"/proc/{service.pid}/status").read_text(encoding="utf-8")
        times = Path(f"/proc/{service.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        service.send_signal(signal.SIGTERM)
    processor = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    return {"seconds": seconds, "processor": processor, "mb": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1e3}  # type: ignore[index]


def _ask(url: str) -> None:
    """One answer, as soon as the service has passed its self-test."""
    while True:
        request = urllib.request.Request(url, b'{"text": "a fine film"}', {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=60).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = options.run or make_run(folder / "run")
        export = options.export or folder / "export"
        if options.export is None:
            subprocess.run([sys.executable, "-m", "budgetformer", "export", str(run), "-o", str(export)], check=True)
        python = make_venv(options.venv or folder / "venv")
        ways = {"onnxruntime": (python, export, runtime_packages()),
                "torch": (sys.executable, run, ["torch", "transformers", "accelerate", "scipy", "scikit-learn",
                                                *runtime_packages()])}  # fmt: skip
        figures: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(options.times + 1):  # the first fills the caches of files and of compiled Python
            for way, (interpreter, model, _) in ways.items():
                figure = start(interpreter, model.resolve())
                figures[way] += [figure] if number else []
        result: dict[str, Any] = {
            way: {"installed_mb": installed(interpreter, packages),
                  **{key: statistics.median(f[key] for f in figures[way]) for key in ("seconds", "processor", "mb")}}
            for way, (interpreter, _, packages) in ways.items()
        }  # fmt: skip
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print("| served by | installed | cold start | processor time of it | resident memory |")
    print("| --- | --- | --- | --- | --- |")
    for way, row in result.items():
        print(f"| {way} | {row['installed_mb']:.0f} MB | {row['seconds']:.2f} s | {row['processor']:.2f} s | "
              f"{row['mb']:.0f} MB |")  # fmt: skip


if __name__ == "__main__":
    main()

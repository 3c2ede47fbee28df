"""The house rules: import direction, public names, and an import that changes nothing."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import typer

import budgetformer
from budgetformer.cli import app

SOURCE = Path(budgetformer.__file__).parent

# A room may import itself and what stands below it. Third-party packages only where listed, at module level.
FLOORS = [
    {"errors"},
    {"dial"},
    {"nn", "cost", "progress"},
    {"runs.files", "runs.provenance"},
    {"data"},
    {"words", "exits"},
    {"spec"},
    {"models"},
    {"engine"},
    {"evaluate"},
    {"calibrate", "explain", "report"},
    {"export"},
    {"runs"},
    {"training", "predict", "serving", "bench", "speed"},
    {"estimator"},
    {"cli"},
    {"__main__"},
]
RANK = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
EXTERNAL = {
    "errors": set(),
    "dial": set(),
    "exits": {"numpy"},
    "spec": set(),
    "words": {"numpy"},
    "nn": {"torch"},
    "cost": set(),
    "data": {"numpy"},
    "report": {"jinja2", "matplotlib"},
    "cli": {"typer", "rich"},
}


def room_of(module: str) -> str:
    """The room that a module, named without the package, stands in: the longest known beginning of its name."""
    parts = module.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in RANK else parts[0]


def room(file: Path) -> str:
    return room_of(".".join(file.relative_to(SOURCE).with_suffix("").parts))


def imports(file: Path, *, module_level: bool) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = tree.body if module_level else list(ast.walk(tree))
    result = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            result |= {f"{node.module}.{alias.name}" for alias in node.names}
    return result


def test_imports_point_downwards() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        here = room(file)
        if here == "__init__":
            continue
        for name in imports(file, module_level=False):
            package, _, module = name.partition(".")
            there = room_of(module)
            if package == "budgetformer" and there in RANK and RANK[there] >= RANK[here] and there != here:
                wrong.append(f"{file.relative_to(SOURCE)} imports {name}")
    assert wrong == []


def loaded_with(module: str, seen: set[str]) -> set[str]:
    """The modules of this package that importing one of them loads, by the files alone."""
    places = (SOURCE / module.replace(".", "/") / "__init__.py", SOURCE / f"{module.replace('.', '/')}.py")
    file = next((place for place in places if place.exists()), None)
    if file is not None and module not in seen:
        seen.add(module)
        for name in imports(file, module_level=True):
            parts = name.split(".")
            if parts[0] == "budgetformer":
                for end in range(2, len(parts) + 1):
                    loaded_with(".".join(parts[1:end]), seen)
    return seen


def test_predicting_and_serving_load_no_training_code() -> None:
    rooms = ("estimator", "explain", "engine", "predict", "serving", "runs", "calibrate")
    files = [f for f in SOURCE.rglob("*.py") if room(f).split(".")[0] in rooms]
    modules = {".".join(f.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for f in files}
    wrong = {m: t for m in modules if (t := [n for n in loaded_with(m, set()) if n.startswith("training")])}
    assert wrong == {}
    assert "engine.scorer" in loaded_with("estimator", set())


def test_the_library_does_not_know_what_is_built_on_it() -> None:
    files = [file for file in SOURCE.rglob("*.py") if "budgetformer_reproduction" in file.read_text(encoding="utf-8")]
    assert files == []


def test_the_picture_in_contributing_is_true() -> None:
    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = guide.split("| --- | --- |")[1].split("\n\n")[0]
    assert [set(re.findall("`(.+?)`", line.split("|")[1])) for line in table.strip().splitlines()] == FLOORS[:-1]
    walk = guide.split("### One CSV row on its way")[1].split("###")[0]
    code = "".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    assert [n for n in re.findall(r"`(\w+?)`", walk) if not re.search(rf"(class|def) {n}\b", code)] == []
    served = walk.split("- **serve**")[1].split("- **")[0]
    assert served.count("->") == 8


def test_every_file_stands_in_a_known_room() -> None:
    rooms = {room(f) for f in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms <= set(RANK)


def test_rooms_import_only_the_packages_they_are_allowed() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        allowed = EXTERNAL.get(room(file))
        if allowed is None:
            continue
        packages = {name.split(".")[0] for name in imports(file, module_level=True)}
        wrong += [
            f"{file.relative_to(SOURCE)} imports {p}"
            for p in packages - allowed - set(sys.stdlib_module_names) - {"budgetformer"}
        ]
    assert wrong == []


def test_the_public_names_are_these() -> None:
    assert sorted(budgetformer.__all__) == [
        "Allocation",
        "BudgetFormerClassifier",
        "BudgetFormerConfig",
        "BudgetFormerError",
        "BudgetFormerForSequenceClassification",
        "BudgetFormerOutput",
        "Dial",
        "ProgressCallback",
        "Run",
        "__version__",
        "load",
        "retrofit",
        "train",
    ]
    for name in budgetformer.__all__:
        assert getattr(budgetformer, name).__doc__
    assert set(dir(budgetformer)) == set(budgetformer.__all__)


def in_fresh_python(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_predicting_serving_and_explaining_load_no_training_code() -> None:
    """Asked of a fresh process. transformers loads accelerate with its model classes, so these must come late."""
    modules = ("predict.job", "serving.app", "serving.server", "estimator", "explain", "runs.run", "calibrate")
    code = (
        f"import sys, json, importlib\nfor name in {modules}: importlib.import_module('budgetformer.' + name)\n"
        "import budgetformer\nbudgetformer.load, budgetformer.BudgetFormerClassifier\n"
        "names = ('accelerate', 'budgetformer.training')\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(names)]))"
    )
    assert in_fresh_python(code) == []


def test_a_run_answers_without_training_code(tiny_run: Path) -> None:
    code = (
        f"import sys, json, budgetformer\nrun = budgetformer.load({str(tiny_run)!r})\nrun.predict(['a fine film'])\n"
        f"budgetformer.BudgetFormerClassifier.load({str(tiny_run)!r}).predict(['a fine film'])\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('budgetformer.training')]))"
    )
    assert in_fresh_python(code) == []


def test_importing_the_package_changes_nothing() -> None:
    state = (
        "import os, sys, logging, warnings, threading, json\n"
        "def state(): return [dict(os.environ), logging.getLogger().level, len(logging.getLogger().handlers), "
        "len(warnings.filters), threading.active_count()]\n"
        "before = state()\nimport budgetformer\nafter = state()\n"
        "heavy = ('torch', 'transformers', 'numpy', 'sklearn')\n"
        "print(json.dumps([before == after, [m for m in heavy if m in sys.modules]]))"
    )
    assert in_fresh_python(state) == [True, []]


def test_variables_are_named_by_what_they_hold() -> None:
    vague = {"found", "own", "given", "kept", "mine", "whole", "wanted", "told"}
    names = []
    for file in [*SOURCE.rglob("*.py"), *(Path(__file__).parents[1] / "reproduction").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
            names += [f"{file.name}:{node.lineno} {name}"] if name.strip("_") in vague else []  # type: ignore[attr-defined]
    assert names == []


def test_files_are_short() -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCE.rglob("*.py")}
    assert {str(file): count for file, count in lines.items() if count > 400} == {}


def test_functions_are_short() -> None:
    long = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                long[f"{file.name}:{node.lineno} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert {name: lines for name, lines in long.items() if lines > 60} == {}


def test_the_command_line_stays_small() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    verbs = {"": command, **command.commands}
    options = [f"{verb} {p.opts[0]}" for verb, c in verbs.items() for p in c.params if p.param_type_name == "option"]
    assert len(options) <= 121, options


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, json, contextlib, io\nfrom budgetformer.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): app(['--help'])\n"
        "heavy = ('torch', 'transformers', 'numpy', 'datasets', 'matplotlib', 'accelerate')\n"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    assert in_fresh_python(code) == []


def test_one_public_name_is_enough_for_the_auto_classes() -> None:
    code = (
        "import json\nfrom budgetformer import BudgetFormerConfig\nfrom transformers import AutoConfig\n"
        "print(json.dumps(AutoConfig.for_model('budgetformer').model_type))"
    )
    assert in_fresh_python(code) == "budgetformer"

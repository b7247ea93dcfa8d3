"""Who may import whom: the order of the rooms, without a circle. CONTRIBUTING says what each is."""

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room may import those above it, and none beside or below it.
ORDER = [
    {"encoding", "errors"},
    {"engines", "config", "templates"},
    {"traces"},
    {"tasks", "training"},
    {"gateway"},
    {"rollouts"},
    {"runs", "rewards"},
    {"trinity", "loop"},
    {"tune", "serving"},
    {"areal", "tools"},
    {"environments", "testing"},
    {"cli"},
]
# Leaves that a function imports by one line, when it needs them.
LAZY = {
    ("tuner.tune", "tuner.trinity.launch"),
    ("tuner.tune", "tuner.tools.viewer"),
    ("tuner.tools.rebase", "tuner.areal"),
    ("tuner.tools.recorded_run", "tuner.areal"),
}
# Parallel modules: what each engine has of its own.
PARALLEL = {"client"}
# Classes with the names of other libraries' classes, which users know.
FOREIGN = {"DatasetConfig", "GRPOConfig", "TrinityChatModel"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "tuner").rglob("*.py")):
        if path.parent.parent.name == "templates":  # users' scripts, which `tuner init` copies
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports: at its top, in functions and for types."""
    known = modules()
    found = defaultdict(set)
    for module, path in known.items():
        if module == "tuner":  # the public names, which nobody inside asks for
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} imports by a relative name"
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else node.module for name in inner]
            found[module].update(name for name in names if name in known)
    return {
        module: {other for other in others if (module, other) not in LAZY}
        for module, others in found.items()
    }


def room(module: str) -> str:
    name = module.split(".")[1]
    return "cli" if name == "__main__" else name


def rank(module: str) -> int:
    return next(place for place, rooms in enumerate(ORDER) if room(module) in rooms)


def test_every_room_has_its_place():
    rooms = {room(module) for module in modules() if module != "tuner"}
    assert rooms == set().union(*ORDER)


def test_a_room_imports_only_what_is_above_it():
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if other == "tuner" or (room(module) != room(other) and rank(other) >= rank(module))
    ]
    assert wrong == []


def test_there_is_no_circle():
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == "done":
            return
        if module in path:
            pytest.fail("a circle: " + " -> ".join([*path[path.index(module) :], module]))
        for other in sorted(imports().get(module, ())):
            visit(other, (*path, module))
        state[module] = "done"

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("name", ["config", "tasks", "traces"])
def test_settings_tasks_and_traces_are_read_without_pytorch(name):
    """So that a wrong setting is refused at once, and a page opens."""
    heavy = [
        module
        for module, path in modules().items()
        if module != "tuner" and room(module) == name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for imported in [getattr(node, "module", None) or node.names[0].name]
        if imported.partition(".")[0] in ("torch", "transformers")
    ]
    assert heavy == []


def test_no_two_modules_have_one_name():
    names = Counter(
        module.rsplit(".", 1)[-1] for module, path in modules().items() if path.stem != "__init__"
    )
    assert {name for name, count in names.items() if count > 1} == PARALLEL


def test_no_class_name_exists_twice():
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == FOREIGN


@cache
def defined(module: str) -> set[str]:
    """Names that a module defines, imports, or gives when somebody asks for them."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # names that are looked up when they are asked for
    return found


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_what_is_imported_is_there(folder):
    """Also by tests that seldom run, and need what is not installed here."""
    known, missing = modules(), []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module not in known:
                continue
            missing += [
                f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" not in known
                and alias.name not in defined(node.module)
            ]
    assert missing == []

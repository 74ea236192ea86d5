"""The house's rules: imports run one way, no two files import each other, and each package stays within its budget."""

import ast
import contextlib
import gc
import pathlib
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest

from samebits.garbage import without_collections

import loc

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = [  # each may import those below it, and nothing of its own floor but itself
    {"cli"},
    {"integrations"},
    {"server"},
    {"trainer", "cluster", "agents"},
    {"engine"},
    {"model", "scheduler"},
    {"kernels"},
]
ALONE = {"correction": set(), "kernels": set(), "scheduler": set()}  # what these may import of ours
PACKAGES = {"correction"}.union(*FLOORS)


def files() -> dict[str, pathlib.Path]:
    """Module name, without "samebits.", -> file."""
    found = {}
    for package in sorted(PACKAGES):
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = files()


def imports(module: str, everywhere: bool = True) -> set[str]:
    """The modules of ours that a file imports. everywhere: also inside functions, and for types only."""
    file = MODULES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(file.read_text())
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = [*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split("."))]
        elif (node.module or "").split(".")[0] == "samebits":
            base = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            for name in (".".join([*base, alias.name]), ".".join(base)):
                if name in MODULES:
                    found.add(name)
                    break
    return found - {module}


def test_imports_run_one_way():
    level = {package: number for number, floor in enumerate(FLOORS) for package in floor}
    wrong = []
    for module in MODULES:
        package = module.split(".")[0]
        for other in {name.split(".")[0] for name in imports(module)} - {package}:
            if package in ALONE:
                wrong.append(f"{module} -> {other}")
            elif other != "correction" and level[other] <= level[package]:
                factory = (module, other) == ("engine.llm", "cluster")  # the one arrow that goes up
                if not factory:
                    wrong.append(f"{module} -> {other}")
    assert not wrong


def test_no_files_import_each_other_in_a_circle():
    arrows = {module: imports(module) for module in MODULES}
    while ends := {module for module, others in arrows.items() if not others & arrows.keys()}:
        for module in ends:
            del arrows[module]
    assert not arrows, "a circle leads through some of these"


def branches(value: ast.expr) -> list[ast.expr]:
    """What an expression may be: the branches of a conditional one, or itself."""
    return [*branches(value.body), *branches(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def assignments_of_several(source: str) -> list[int]:
    """The lines that assign values to as many targets, and aren't a swap or a rotation."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Tuple | ast.List)]
            values = branches(node.value)
            if targets and all(isinstance(value, ast.Tuple | ast.List) for value in values):
                names = [{ast.unparse(each) for each in part.elts} for part in (*targets, *values)]
                if any(each != names[0] for each in names):
                    found.append(node.lineno)
    return found


def test_no_statement_assigns_two_values_but_to_swap():
    """Kernels aside, where a pair of accumulators begins together."""
    found = []
    for module, file in MODULES.items():
        if module.split(".")[0] != "kernels":
            found += [f"{module}, line {number}" for number in assignments_of_several(file.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("line", "several"),
    [
        ("a, b = 1, 2", True),
        ("a, b = c, []", True),
        ("a, self.b = self.b, []", True),  # reads what it assigns, and yet is no swap
        ("a, b = b, a + b", True),
        ("a, b = (1, 2) if c else (3, 4)", True),
        ("a, b = f() if c else (3, 4) if d else (5, 6)", False),  # it may unpack what f gave
        ("a, b = (1, 2) if c else (3, 4) if d else (5, 6)", True),
        ("a, b = b, a", False),
        ("a[i], a[j], c = a[j], c, a[i]", False),
        ("a, b = f()", False),
        ("a, *b = c", False),
        ("a = 1, 2", False),
    ],
)
def test_an_assignment_of_several_values_is_told_from_a_swap_and_an_unpacking(line, several):
    assert bool(assignments_of_several(line)) == several


def test_the_garbage_collector_is_off_until_the_last_block_ends_and_then_what_it_was():
    with contextlib.suppress(ImportError), without_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    with ThreadPoolExecutor(1) as other:
        with without_collections():
            inner = without_collections()
            other.submit(inner.__enter__).result()
        assert not gc.isenabled()
        other.submit(inner.__exit__, None, None, None).result()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_packages_stay_within_their_budgets():
    sizes = loc.sizes()
    for group, budget in loc.BUDGETS.items():
        assert budget is None or sizes[group] <= budget, f"{group} has {sizes[group]} code lines, more than {budget}"


def test_a_wheel_has_every_package_and_its_files():
    """An editable install, as of the tests, has all of them anyway."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(("samebits", *file.parent.relative_to(ROOT).parts)) for file in MODULES.values()}
    assert sorted(setuptools["packages"]) == sorted({"samebits"} | folders)
    others = [
        path for package in PACKAGES for path in (ROOT / package).rglob("*.*") if path.suffix not in (".py", ".pyc")
    ]
    data = [(".".join(("samebits", *path.parent.relative_to(ROOT).parts)), path.name) for path in others]
    assert sorted(data) == sorted((name, file) for name, found in setuptools["package-data"].items() for file in found)

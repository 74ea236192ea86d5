"""The documentation's rules: everything public has a docstring, the API pages cover it, and no link is dead."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = [
    "kernels",
    "model",
    "scheduler",
    "engine",
    "cluster",
    "trainer",
    "agents",
    "correction",
    "integrations",
    "server",
    "cli",
]
FILES = [ROOT / "__init__.py", *sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BARE = {
    "Of", "By", "For", "As", "To", "In", "At", "With", "Without", "From", "On", "Per", "And", "But", "Or",
    "What", "Which", "Who", "Whose", "Where", "When", "That",
}  # fmt: skip

# The third person without a subject. Other verbs are seen by what follows: no noun stands before an article.
VERBS = {
    "Accumulates", "Admits", "Answers", "Asks", "Checks", "Decides", "Ends", "Generates", "Gives", "Keeps", "Lets",
    "Makes", "Marks", "Multiplies", "Notes", "Reads", "Remembers", "Runs", "Serves", "Speaks", "Writes",
}  # fmt: skip
WITH_OBJECT = re.compile(
    r"[A-Z][a-z]*[^s\W]s (and \w+ )?(the|an?|one|its|each|every|how|what|which|where|until|from the)\b"
)


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The public classes, functions and methods of a file, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if named and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


def fault(node: ast.AST) -> str:
    """Return what is wrong with a docstring; empty if nothing is."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return "no docstring"
    sentence = re.match(r".*?[.?](?=\s|$)", docstring.split("\n\n")[0], re.DOTALL)
    if sentence is None:
        return "the first sentence has no full stop"
    opening = re.split(r"\W", sentence[0])[0]
    if opening in BARE:
        return f"it starts with a bare {opening!r}"
    if opening in VERBS or WITH_OBJECT.match(sentence[0]):
        return f"{opening!r} has no subject: use the imperative, or name the thing"
    return ""


@pytest.mark.parametrize("package", ["__init__.py", *PACKAGES])
def test_everything_public_has_a_docstring_that_starts_with_a_sentence(package):
    wrong = []
    for file in FILES:
        name = file.relative_to(ROOT)
        if name.parts[0] == package:
            tree = ast.parse(file.read_text())
            found = {"module": tree, **dict(public(tree))}
            wrong += [f"{name}: {what}: {fault(node)}" for what, node in found.items() if fault(node)]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Of all replicas.",
        "What serves requests.",
        "A thing without an end",
        "Serves requests.",
        "Forgets the rest.",
        "Steps until the end.",
    ],
)
def test_bad_docstrings_are_found(text):
    assert fault(ast.parse(f'"""{text}"""'))


@pytest.mark.parametrize(
    "text", ["Steps under way.", "Process a step.", "Drafts from what was seen.", "Serve requests."]
)
def test_good_docstrings_pass(text):
    assert not fault(ast.parse(f'"""{text}"""'))


def documented() -> set[str]:
    """The dotted names that the API pages ask mkdocstrings for."""
    pages = (ROOT / "docs/api").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: samebits\.(\S+)$", page.read_text(), re.MULTILINE)}


def exported(file: pathlib.Path) -> list[str]:
    """The names in a package's `__all__`."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_the_api_pages_have_every_public_name():
    packages = {file.parent: exported(file) for file in FILES if file.name == "__init__.py"}
    asked = documented()
    shown = {name.split(".")[-1] for name in asked}
    for folder, names in packages.items():  # a page on a package has all of its names
        if ".".join(folder.relative_to(ROOT).parts) in asked:
            shown |= set(names)
    for folder in packages:
        assert {name for name in packages[folder] if not name.startswith("_")} <= shown, folder


def test_the_api_pages_name_what_exists():
    for name in documented():
        parts = name.split(".")
        folders = [part for i, part in enumerate(parts) if (ROOT / "/".join(parts[: i + 1])).is_dir()]
        rest = parts[len(folders) :]
        module = ROOT / "/".join(folders)
        if rest and (module / f"{rest[0]}.py").exists():
            found = set(dict(public(ast.parse((module / f"{rest[0]}.py").read_text()))))
            assert set(rest[1:]) <= found, name
        else:
            assert set(rest) <= set(exported(module / "__init__.py")), name


def test_the_api_pages_have_every_route():
    routes = re.compile(r'^@\w+\.(?:get|post)\("([^"]+)"', re.MULTILINE)
    page = (ROOT / "docs/api/server.md").read_text()
    for file in (ROOT / "server").glob("*.py"):
        for route in routes.findall(file.read_text()):
            assert re.search(rf"`(GET|POST) {re.escape(route)}`", page), (file.name, route)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_no_link_is_dead(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def floors(file: str) -> list[set[str]]:
    """The packages by floor, as a file lists them."""
    assigned = {ast.unparse(n.targets[0]): n.value for n in ast.parse((ROOT / file).read_text()).body
                if isinstance(n, ast.Assign)}  # fmt: skip
    return [set(floor) for floor in ast.literal_eval(assigned["FLOORS"])]


def test_the_figure_of_the_architecture_has_the_floors_that_imports_keep_to():
    *drawn, lowest = floors("docs/draw_architecture.py")
    assert [*drawn, lowest - {"correction"}] == floors("tests/test_structure.py")
    assert "correction" in lowest, "it imports nothing of ours"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert page.relative_to(ROOT / "docs").as_posix() in navigation


def test_the_start_page_has_the_example_of_the_readme():
    example = re.search(r"```python\n.*?```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    assert example[0] in (ROOT / "docs/index.md").read_text()

"""Documentation is code: its blocks and docstring examples run, its links exist."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import textwrap
import tomllib

import jax
import pytest

import twinkle_jax
from twinkle_jax.training import TrainConfig
from twinkle_jax.training.config import flat

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(twinkle_jax.__path__, "twinkle_jax.")
    if not module.ispkg
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _blocks(page, language):
    """Find the fenced blocks of `page` in `language`, with the line that each starts on."""
    text = page.read_text()
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 1, match.group(1)


@pytest.fixture
def user_settings():
    """Use JAX's defaults, since documentation does not assume the strict promotion of tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


IN_DEFAULT_RUN = ("README.md", "quickstart.md")


@pytest.mark.parametrize(
    "page",
    [p if p.name in IN_DEFAULT_RUN else pytest.param(p, marks=pytest.mark.slow) for p in PAGES],
    ids=lambda page: page.name,
)
@pytest.mark.usefixtures("user_settings")
def test_python_blocks_run_from_top_to_bottom(page, capsys):
    names = {"__name__": page.stem}
    for line, block in _blocks(page, "python"):
        code = compile("\n" * line + block, str(page), "exec")
        exec(code, names)  # noqa: S102  (our own documentation)
        printed = capsys.readouterr().out.splitlines()
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert [text for text in expected if text not in printed] == []


def test_options_in_the_documentation_exist():
    settings = flat(dataclasses.asdict(TrainConfig()))
    sections = "|".join({name.split(".")[0] for name in settings if "." in name})
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which tells what was
    for page in [*pages, *ROOT.glob("examples/**/*.md"), *ROOT.glob("examples/launch/*")]:
        options = re.findall(rf"--((?:{sections})\.\w+)", page.read_text())
        assert set(options) <= settings.keys(), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_the_cells_of_its_header(page):
    """A bar inside a formula ends its cell: the rest of the row was not shown."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        bars = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(bars) == 1, table


def test_pages_have_blocks():
    with_blocks = {page.name for page in PAGES if any(_blocks(page, "python"))}
    assert {"README.md", "advantages.md", "from_twinkle.md"} <= with_blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.usefixtures("user_settings")
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not result.failed


PUBLIC = [
    (package, name)
    for package in ("advantage", "data", "loss", "model", "reward")
    for name in importlib.import_module(f"twinkle_jax.{package}").__all__
]


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_public_names_are_documented(package, name):
    value = getattr(importlib.import_module(f"twinkle_jax.{package}"), name)
    is_alias = not (inspect.isfunction(value) or inspect.isclass(value))
    if is_alias or value.__module__ == "jaxtyping":
        return
    assert value.__doc__, f"{name} has no docstring"
    if inspect.isfunction(value) and package != "model":  # docs/models.md shows those at work
        assert "Args:" in value.__doc__
        assert ">>>" in value.__doc__, f"{name} has no example"


ROOMS = ("advantage", "loss", "model", "data", "reward", "sampler", "rollout", "training")


def _annotations(node):
    """Find the annotations of a function, or of the attributes and public methods of a class."""
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if not getattr(part, "name", "").startswith("_") or part.name == "__init__":
                yield from _annotations(part)
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.FunctionDef):
        arguments = [node.args.vararg, node.args.kwarg, *node.args.args, *node.args.kwonlyargs]
        yield from (x.annotation for x in arguments if x and x.annotation)
        yield node.returns


def _defined_here(tree):
    """List the names that a file defines, or imports from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("twinkle_jax"):
            yield from (alias.name for alias in node.names)
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        yield from (getattr(x, "id", getattr(x, "name", None)) for x in targets)


@pytest.mark.parametrize("room", ROOMS)
def test_types_of_public_signatures_are_public(room):
    public = {n for p in ROOMS for n in importlib.import_module(f"twinkle_jax.{p}").__all__}
    names = importlib.import_module(f"twinkle_jax.{room}").__all__
    private = set()
    for path in (ROOT / "twinkle_jax" / room).rglob("*.py"):
        tree = ast.parse(path.read_text())
        here = set(_defined_here(tree))
        for node in tree.body:
            if getattr(node, "name", None) in names:
                for annotation in _annotations(node):
                    for name in re.findall(r"[\w.]+", ast.unparse(annotation)):
                        first, last = name.split(".")[0], name.split(".")[-1]
                        if first in here and last not in public:
                            private.add((node.name, name))
    assert not private


def test_public_names_are_on_the_reference_pages():
    listed = re.findall(
        r"^\.\. auto(?:function|class|data):: (\w+)$",
        "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md")),
        re.MULTILINE,
    )
    public = {n for p in ROOMS for n in importlib.import_module(f"twinkle_jax.{p}").__all__}
    # A type such as Scalar is on the page of each room that has it.
    assert set(listed) == public | {"TransformersModel"}


def test_readme_quotes_the_example():
    [(_, quoted)] = _blocks(ROOT / "README.md", "py")
    example = (ROOT / "examples/checkpoint_to_update.py").read_text()
    assert textwrap.indent(quoted, " " * 8) in example


def test_links_inside_the_repository_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_agrees_with_pyproject():
    readme = (ROOT / "README.md").read_text()
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {oldest} or newer" in readme
    for extra in re.findall(r"pip install -e '?\.\[([a-z0-9,]+)\]", readme):
        assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])
    floor = next(d for d in PROJECT["dependencies"] if d.startswith("jax>"))
    assert f"JAX {floor.removeprefix('jax>=').rsplit('.', 1)[0]}" in readme


def test_every_example_has_a_test():
    for example in (ROOT / "examples").glob("*.py"):
        assert (ROOT / "tests/examples" / f"test_{example.name}").exists()

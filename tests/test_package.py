"""The package: what importing it costs, which way imports point, and what installing it does to the install around it."""

import ast
import json
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from conftest import ROOT

import msprobe

PACKAGE = ROOT / "msprobe"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def parsed(path):
    return ast.parse(path.read_text("utf-8"))


def name_of(path):
    """Return a source's module name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCES}


def imports_of(tree):
    """Yield (imported module or name, whether the import stands at module level) but for those that only type checkers see."""

    def walk(node, is_top):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, is_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute"
                yield from ((f"{child.module}.{alias.name}", is_top) for alias in child.names)
            else:
                yield from walk(child, is_top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    return list(walk(tree, True))


def importers_of(package, top_only=False):
    """Return the modules of msprobe that import a package."""
    return {
        name
        for name, path in MODULES.items()
        for imported, is_top in imports_of(parsed(path))
        if imported.partition(".")[0] == package and (is_top or not top_only)
    }


def below(*rooms):
    return {
        name
        for name in MODULES
        if name.startswith(tuple(f"msprobe.{room}." for room in rooms)) or name in {f"msprobe.{room}" for room in rooms}
    }


def test_the_sources_are_found():
    assert len(SOURCES) > 50
    assert importers_of("torch")
    assert importers_of("modelscope")


def test_only_the_host_imports_modelscope():
    assert importers_of("modelscope") <= below("host")


def test_only_host_and_capture_import_torch_when_they_are_imported():
    assert importers_of("torch", top_only=True) <= below("host", "capture")


def test_what_reads_and_shows_runs_imports_torch_nowhere_but_in_doctor():
    assert importers_of("torch") & below("trace", "analysis", "views", "commands") <= {"msprobe.commands.doctor"}


def rooms():
    """Return which part of the package imports which, whenever it does: its folders, and the modules that stand beside them."""

    def room(name):
        return ".".join(name.split(".")[:2])

    found = {}
    for name, path in MODULES.items():
        if name in ("msprobe", "msprobe.__main__"):  # the first names everybody, the second is the command line
            continue
        targets = {room(imported) for imported, _ in imports_of(parsed(path)) if imported.startswith("msprobe.")}
        found.setdefault(room(name), set()).update(targets - {room(name)})
    return found


def cycle_in(graph):
    """Return a cycle of a graph, or None."""

    def visit(node, path):
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph.get(node, ())):
            cycle = visit(target, [*path, node])
            if cycle:
                return cycle
        done.add(node)
        return None

    done = set()
    return next((cycle for cycle in (visit(node, []) for node in sorted(graph)) if cycle), None)


def test_the_search_for_cycles_finds_one():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_imports_between_the_parts_point_one_way():
    assert cycle_in(rooms()) is None


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {}
    for name, path in MODULES.items():
        imported = {target for target, is_top in imports_of(parsed(path)) if is_top and target.startswith("msprobe.")}
        graph[name] = {target if target in MODULES else target.rpartition(".")[0] for target in imported} - {name, "msprobe"}
    assert cycle_in(graph) is None


FORBIDDEN = {
    "msprobe.capture": {"msprobe.host", "msprobe.analysis", "msprobe.views", "msprobe.commands", "msprobe.launch"},
    "msprobe.trace": {"msprobe.capture", "msprobe.host", "msprobe.analysis", "msprobe.views", "msprobe.commands"},
    "msprobe.analysis": {"msprobe.capture", "msprobe.host", "msprobe.views", "msprobe.commands"},
    "msprobe.views": {"msprobe.capture", "msprobe.host", "msprobe.commands"},
    "msprobe.host": {"msprobe.analysis", "msprobe.commands", "msprobe.launch"},
    "msprobe.launch": {"msprobe.capture", "msprobe.host", "msprobe.analysis", "msprobe.views", "msprobe.commands"},
    "msprobe.schema": {"msprobe.capture", "msprobe.host", "msprobe.trace", "msprobe.analysis", "msprobe.views", "msprobe.commands"},
}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_the_parts_know_only_what_lies_below_them(room):
    assert rooms()[room] & FORBIDDEN[room] == set()


def test_devices_are_never_reached_through_the_name_of_one():
    assert [path.name for path in SOURCES if "torch.cuda" in path.read_text("utf-8")] == []


# What importing costs


def in_new_process(code, *flags):
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, json; before = set(sys.modules); import msprobe; dir(msprobe); print(json.dumps(sorted(set(sys.modules) - before)))"
    loaded = in_new_process(code)
    assert "msprobe" in loaded
    assert [name for name in loaded if name.partition(".")[0] in ("torch", "modelscope", "rich", "msgspec", "wrapt", "numpy")] == []


def test_an_interpreter_that_is_not_traced_loads_nothing_of_msprobe():
    assert in_new_process("import sys, json; print(json.dumps([name for name in sys.modules if 'probe' in name or name == 'wrapt']))") == []


def test_the_public_names_are_those_that_are_declared():
    assert msprobe.__all__ == sorted(msprobe.__all__)
    assert {name for name in dir(msprobe) if not name.startswith("_")} - {"annotations", "TYPE_CHECKING", "Any"} - imported_rooms() == set(
        msprobe.__all__
    ) - imported_rooms()
    for name in msprobe.__all__:
        assert getattr(msprobe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = msprobe.nothing


def imported_rooms():
    """Python puts a submodule that somebody imported among the names of its package."""
    return {name.split(".")[1] for name in sys.modules if name.startswith("msprobe.")}


def test_what_the_package_says_for_type_checkers_is_what_it_resolves():
    declared = {
        alias.name: child.module
        for node in parsed(PACKAGE / "__init__.py").body
        if isinstance(node, ast.If)
        for child in node.body
        if isinstance(child, ast.ImportFrom)
        for alias in child.names
    }
    assert set(declared) == set(msprobe.__all__)
    for name, home in declared.items():
        assert getattr(msprobe, name) is getattr(__import__(home, fromlist=[name]), name)


# What installing does


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_what_an_interpreter_reads_at_its_start(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {str(path.relative_to(ROOT)) for path in SOURCES} <= names
    assert {"modelscope_probe.pth", "_modelscope_probe_boot.py", "msprobe/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {
        "msprobe",
        "modelscope_probe.pth",
        "_modelscope_probe_boot.py",
        next(name for name in names if ".dist-info/" in name).partition("/")[0],
    }


def test_installing_asks_for_neither_torch_nor_modelscope():
    required = {line for line in distribution("modelscope-probe").requires if "extra ==" not in line}
    assert {line.split(">")[0].strip() for line in required} == {"msgspec", "rich", "wrapt", "safetensors"}
    extra = {line for line in distribution("modelscope-probe").requires if 'extra == "train"' in line or "extra == 'train'" in line}
    assert {line.split(">")[0].split(";")[0].strip() for line in extra} >= {"torch", "modelscope", "diffusers", "transformers"}


STANDING = {"torch": "2.1.0", "modelscope": "1.9.5", "msgspec": "0.19.0", "rich": "13.0.0", "wrapt": "1.16.0", "safetensors": "0.4.0"}


def test_installing_changes_nothing_that_is_installed(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name, version in STANDING.items():  # as pip sees an install of those versions
        information = site / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (information / "RECORD").write_text("")

    def frozen():
        listed = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        return {line for line in listed.splitlines() if not line.startswith("modelscope-probe")}

    before = frozen()
    assert f"torch=={STANDING['torch']}" in before
    # With its dependencies, and without an index: what is there has to do.
    subprocess.run([python, "-m", "pip", "install", "--no-index", "--quiet", str(wheel)], check=True, capture_output=True, text=True)
    assert frozen() == before
    assert (site / "modelscope_probe.pth").exists()
    assert (tmp_path / "venv" / "bin" / "msprobe").exists()
    assert (tmp_path / "venv" / "bin" / "modelscope-probe").exists()
    installed = next(PathDistribution(path) for path in site.glob("modelscope_probe-*.dist-info"))
    assert installed.metadata["Name"] == "modelscope-probe"


def test_what_starts_with_the_interpreter_here_is_what_stands_in_the_repository():
    """An editable install copies these two: after a change to them it has to be installed again."""
    site = Path(distribution("modelscope-probe").locate_file(""))
    for name in ("_modelscope_probe_boot.py", "modelscope_probe.pth"):
        assert (site / name).read_text() == (ROOT / name).read_text()

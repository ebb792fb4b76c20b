"""Loads the allocator classes of an SGLang release from a directory, without its serving stack.

The four allocator modules are run in a namespace whose `import` statement is ours: `sglang.*`
comes from the release's own allocator modules or from the stand-ins, everything else from Python
as usual. `sys.modules` is never touched, so several releases load side by side, and an sglang
installed in this process neither sees nor disturbs them. Their classes cannot be pickled for the
same reason: a child process loads its release again.

Leaves out driving the classes, and every allocator of a release but token, paged and hybrid SWA.
"""

import ast
import builtins
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from kvcore.targets.sglang.stand_ins import (
    KERNEL_DOUBLES,
    KERNEL_MODULES,
    SERVING_STACK,
    BaseSWAKVPool,
)

OLDEST = "0.5.13"
"""The first release that has the allocator package."""
NEWEST_TRIED = "0.5.23"
"""The newest release that was loaded and driven; later ones load if they keep its layout."""

_PACKAGE = "sglang.srt.mem_cache.allocator"
_ALLOCATORS = tuple(f"{_PACKAGE}.{name}" for name in ("base", "token", "paged", "swa"))
_EXPECTED = "expected what `pip install --no-deps --target DIR sglang==V` puts into DIR"
_LAYOUT = f"expected the layout of releases {OLDEST} to {NEWEST_TRIED}"


class ReleaseError(Exception):
    """A directory does not hold a release that can be loaded; one sentence says what and where."""


@dataclass(frozen=True)
class Release:
    """The allocator classes of one release.

    Constructor arguments are those of the release: `token_allocator(size, dtype, device, kvcache,
    need_sort)`, `paged_allocator(size, page_size, dtype, ...)`, `swa_allocator(size, size_swa,
    page_size, dtype, ...)` with a kvcache that derives from `swa_pool_base`.
    """

    directory: Path
    version: str
    token_allocator: type
    paged_allocator: type
    swa_allocator: type
    swa_pool_base: type

    def version_at_least(self, text: str) -> bool:
        """Whether this release is `text` or later, in the order of Python package versions."""
        return _version_key(self.version) >= _version_key(text)


Kernels = Literal["doubles", "triton"] | Mapping[str, object]
"""Which page kernels a release launches: the doubles, its own, or others by name."""


def load_release(directory: Path, *, kernels: Kernels = "doubles") -> Release:
    """Load the release that `directory` holds: a `pip --target` directory or a site-packages.

    `kernels="triton"` runs the release's own page kernels. Without a GPU that takes
    `TRITON_INTERPRET=1` in the environment before the call, patience (50 to 400 launches a
    second), and a child process: a kernel that reads beyond the free list may end the process.
    Raises ReleaseError.
    """
    if not directory.is_dir():
        raise ReleaseError(f"{directory}: no such directory; {_EXPECTED}")
    if not (directory / "sglang").is_dir():
        raise ReleaseError(f"{directory}: holds no sglang package; {_EXPECTED}")
    version = _read_version(directory)
    if _version_key(version) < _version_key(OLDEST):
        raise ReleaseError(f"{directory}: sglang {version} is too old; expected {OLDEST} or later")
    namespace = _Namespace(directory, version, kernels)
    classes = {
        name: namespace.find_class(f"{_PACKAGE}.{module}", name)
        for module, name in (
            ("token", "TokenToKVPoolAllocator"),
            ("paged", "PagedTokenToKVPoolAllocator"),
            ("swa", "SWATokenToKVPoolAllocator"),
        )
    }
    return Release(
        directory=directory,
        version=version,
        token_allocator=classes["TokenToKVPoolAllocator"],
        paged_allocator=classes["PagedTokenToKVPoolAllocator"],
        swa_allocator=classes["SWATokenToKVPoolAllocator"],
        swa_pool_base=BaseSWAKVPool,
    )


class _Namespace:
    """The `sglang.*` modules of one loaded release, and the import statement that they use."""

    def __init__(self, directory: Path, version: str, kernels: Kernels) -> None:
        self._directory = directory
        self._version = version
        stand_ins = dict(SERVING_STACK)
        self._sources = set(_ALLOCATORS)
        if kernels == "doubles":
            stand_ins |= KERNEL_DOUBLES
        elif isinstance(kernels, Mapping):
            stand_ins |= dict.fromkeys(KERNEL_MODULES, kernels)
        elif importlib.util.find_spec("triton") is None:
            raise ReleaseError(
                "kernels='triton': the triton package is missing; expected it installed "
                "(`pip install triton`), and TRITON_INTERPRET=1 where there is no GPU"
            )
        else:
            self._sources.update(KERNEL_MODULES)
        self._modules = {name: _module(name, names) for name, names in stand_ins.items()}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def find_class(self, module: str, name: str) -> type:
        """The class of that name, its module run if it was not yet. Raises ReleaseError."""
        try:
            found = vars(self._load(module)).get(name)
        except ReleaseError:
            raise
        except Exception as error:  # whatever a foreign module raises while it is run
            reason = (str(error).splitlines() or [""])[0]
            raise ReleaseError(
                f"{self._directory}: {module} of sglang {self._version} does not load "
                f"({type(error).__name__}: {reason}); {_LAYOUT}"
            ) from error
        if not isinstance(found, type):
            raise ReleaseError(
                f"{self._directory}: {module} of sglang {self._version} has no class {name}; "
                f"{_LAYOUT}"
            )
        return found

    def _load(self, name: str) -> ModuleType:
        if name in self._modules:
            return self._modules[name]
        if name not in self._sources:
            raise ModuleNotFoundError(
                f"{name} is not there: only the allocators of sglang {self._version} are loaded",
                name=name,
            )
        path = self._directory.joinpath(*name.split(".")).with_suffix(".py")
        if not path.is_file():
            raise ReleaseError(f"{path}: no such file in sglang {self._version}; {_LAYOUT}")
        try:
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte, in some versions
            line = (isinstance(error, SyntaxError) and error.lineno) or 1
            raise ReleaseError(
                f"{path}:{line}: not valid Python; expected the file as sglang {self._version} "
                "was released"
            ) from error
        module = _module(
            name,
            {
                "__builtins__": self._builtins,
                "__file__": str(path),
                "__package__": name.rpartition(".")[0],
            },
        )
        self._modules[name] = module
        exec(code, vars(module))
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What the import statement calls; the signature is that of `builtins.__import__`."""
        absolute = name
        if level:
            package = str((globals or {}).get("__package__", ""))
            absolute = importlib.util.resolve_name("." * level + name, package)
        if absolute.split(".")[0] != "sglang":
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if not fromlist:
            raise ModuleNotFoundError(
                f"`import {absolute}` is not provided for; expected `from {absolute} import ...`",
                name=absolute,
            )
        module = self._load(absolute)
        missing = [wanted for wanted in fromlist if wanted not in vars(module)]
        if missing:
            raise ImportError(f"{absolute} has no stand-in for {', '.join(missing)}", name=absolute)
        return module


def _module(name: str, names: Mapping[str, object]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _read_version(directory: Path) -> str:
    """The version that the directory's metadata states, or else the package's version files."""
    metadata = sorted(directory.glob("sglang-*.dist-info/METADATA"))
    if len(metadata) > 1:
        found = ", ".join(path.parent.name for path in metadata)
        raise ReleaseError(f"{directory}: holds {found}; expected one release of sglang")
    if metadata:
        stated = re.search(r"^Version: *(\S+)", metadata[0].read_text("utf-8"), re.MULTILINE)
        version = stated.group(1) if stated else None
    else:
        package = directory / "sglang"
        version = _assigned_version(package / "_version.py")
        version = version or _assigned_version(package / "version.py")
    if version is None or _VERSION.fullmatch(version) is None:
        raise ReleaseError(
            f"{directory}: states {'no version' if version is None else repr(version)} for sglang; "
            "expected a version in sglang-*.dist-info/METADATA or sglang/_version.py"
        )
    return version


def _assigned_version(path: Path) -> str | None:
    """The text that a version file assigns at its top level, read without running the file."""
    if not path.is_file():
        return None
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return None
    for statement in statements:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        if targets & {"__version__", "version"} and isinstance(statement.value.value, str):
            return statement.value.value
    return None


_VERSION = re.compile(
    r"v?(?P<release>\d+(\.\d+)*)((?P<phase>a|b|rc)(?P<number>\d+))?"
    r"(\.post(?P<post>\d+))?(\.dev(?P<dev>\d+))?(\+[\w.]+)?"
)


def _version_key(text: str) -> tuple[tuple[int, ...], int, int, int, float]:
    """A key that sorts as package versions do: dev, a, b, rc, final, post; local parts ignored."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a version; expected a form like {NEWEST_TRIED}")
    release = [int(part) for part in match["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    post = -1 if match["post"] is None else int(match["post"])
    dev = float("inf") if match["dev"] is None else int(match["dev"])
    if match["phase"] is not None:
        phase = {"a": 1, "b": 2, "rc": 3}[match["phase"]]
    else:
        phase = 0 if match["dev"] is not None and post < 0 else 4
    return tuple(release), phase, int(match["number"] or 0), post, dev

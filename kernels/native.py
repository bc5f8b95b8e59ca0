"""Builds the C sources of kernels with the system's compiler on first use, keeps the result, and loads it.

Knows compilers, folders and libraries; knows no kernel. A library is kept in the user's cache folder under a
name that changes with the sources, the compiler, its flags, the CPU's features and the OpenMP runtime. It is
code, so it is loaded only from a folder and a file that nobody else can write, and only if it is whole. Where
the cache folder can't be used, each process builds its own in a private temporary folder.

Libraries are linked to the OpenMP runtime that torch has already loaded: with two runtimes there would be two
pools of threads that fight for the cores. Environment: CC names the compiler, XDG_CACHE_HOME the cache.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - its OpenMP runtime must be loaded before a library looks for one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger("hybridserve")

POINTER = ctypes.c_void_p
"""What `Tensor.data_ptr()` is passed as."""

INT = ctypes.c_int64
"""Every size, stride and number of threads."""

_HEADERS = Path(__file__).resolve().parent
_DIGEST_BYTES = hashlib.sha256().digest_size
_SECONDS_TO_COMPILE = 300


class BuildError(Exception):
    """Why there is no library; one line that a user can read."""


def load(source: Path, functions: Mapping[str, Sequence[type[Any]]]) -> ctypes.CDLL:
    """The library of a C source, built if need be; its `functions`, by argument types, return nothing.

    A call releases the interpreter's lock. RuntimeError with the reason if there can't be a library.
    """
    library = _library_or_reason(source)
    if isinstance(library, str):
        raise RuntimeError(f"{source}: {library}")
    return declare(library, functions)


def obstacle(source: Path) -> str | None:
    """Why the library of a C source can't be had here, or None; builds it if need be."""
    library = _library_or_reason(source)
    return library if isinstance(library, str) else None


@functools.cache
def _library_or_reason(source: Path) -> ctypes.CDLL | str:
    """Once a process: a compiler that fails is not asked again by every engine."""
    try:
        return open_library(source)
    except BuildError as error:
        return str(error)


def open_library(source: Path) -> ctypes.CDLL:
    """Find or build, and load; asks the environment anew on every call. Raises BuildError."""
    recipe = _Recipe.of(source)
    try:
        return _from_cache(recipe, _cache_folder())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        reason = error
    with tempfile.TemporaryDirectory(prefix="hybridserve-") as folder:  # a loaded file may be removed
        try:
            return ctypes.CDLL(str(_compile(recipe, Path(folder), f"for this process only: {reason}")))
        except OSError as error:
            raise BuildError(f"a library can't be loaded ({error})") from None


def declare(library: ctypes.CDLL, functions: Mapping[str, Sequence[type[Any]]]) -> ctypes.CDLL:
    """Say what a library's functions take; returns the library."""
    for name, argument_types in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argument_types, None
    return library


@dataclass(frozen=True, slots=True)
class _Recipe:
    """All that a library's content depends on."""

    source: Path
    compiler: tuple[str, ...]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    threaded: bool
    key: str

    @classmethod
    def of(cls, source: Path) -> _Recipe:
        """Raises BuildError if there is no compiler."""
        compiler = tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)
        if shutil.which(compiler[0]) is None:
            raise BuildError(f"no C compiler ({compiler[0]}; the variable CC can name another)")
        version = _version(compiler)
        runtime = _openmp_runtime(version)
        compile_flags = (
            *("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
            "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native",
            *(("-fopenmp",) if runtime else ()),
        )
        link_flags = ("-shared", *((runtime,) if runtime else ()), "-lm")
        headers = sorted({*_HEADERS.rglob("*.h"), *source.parent.glob("*.h")})
        parts = [*compiler, version, *compile_flags, *link_flags, platform.machine(), _cpu_features()]
        parts += [path.read_text() for path in (source, *headers)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return cls(source, compiler, compile_flags, link_flags, runtime is not None, key)

    @property
    def name(self) -> str:
        return f"{self.source.parent.name}-{self.key[:32]}.so"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "hybridserve" / "native"


def _from_cache(recipe: _Recipe, folder: Path) -> ctypes.CDLL:
    """Raises OSError if the folder can't be used, BuildError if the compiler fails."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _only_we_write(folder.stat()):
        raise PermissionError(f"{folder} can be written by others")
    path = folder / recipe.name
    if (library := _open_whole(path)) is not None:
        return library
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (library := _open_whole(path)) is not None:  # built by another process meanwhile
            return library
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = _compile(recipe, Path(scratch), f"kept in {folder}")
            with built.open("r+b") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)
            built.replace(path)
    if (library := _open_whole(path)) is None:
        raise OSError(f"{path} can't be loaded")
    return library


def _open_whole(path: Path) -> ctypes.CDLL | None:
    """A library that is there, ours, and as it was written; the digest at its end says so."""
    try:
        info = path.lstat()
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(info.st_mode) and _only_we_write(info)):
        return None
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _only_we_write(info: os.stat_result) -> bool:
    return info.st_uid in (0, os.geteuid()) and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(recipe: _Recipe, folder: Path, where: str) -> Path:
    """Build into `folder`. Raises BuildError with the compiler's first complaint."""
    threads = "" if recipe.threaded else ", for one thread (no OpenMP runtime of torch to link with)"
    # A warning, so that it is seen where no logging is set up: this start takes longer than the next.
    logger.warning("building C kernels: %s%s (%s)", recipe.source.parent.name, threads, where)
    compiled, linked = folder / "kernels.o", folder / "kernels.so"
    files = [f"-I{_HEADERS}", "-c", "-o", str(compiled), str(recipe.source)]
    _run([*recipe.compiler, *recipe.compile_flags, *files])
    # Without -fopenmp, which would link the compiler's own runtime.
    _run([*recipe.compiler, "-o", str(linked), str(compiled), *recipe.link_flags])
    compiled.unlink()
    return linked


def _run(command: list[str]) -> str:
    """Standard output of a compiler. Raises BuildError."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS_TO_COMPILE,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"C compiler {command[0]} can't be run ({error})") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        complaint = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildError(f"C compiler {command[0]} fails ({complaint or f'status {done.returncode}'})")
    return done.stdout


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


def _openmp_runtime(compiler_version: str) -> str | None:
    """The file of the OpenMP runtime in this process, if code of this compiler can use it."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = {line.split(maxsplit=5)[-1] for line in maps}
    runtimes = sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    if "clang" in compiler_version:  # its calls are not those of GNU's runtime
        runtimes = [path for path in runtimes if not Path(path).name.startswith("libgomp")]
    return runtimes[0] if runtimes else None


@functools.cache
def _cpu_features() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

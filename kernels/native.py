"""Builds the C sources of kernels with the system's compiler on first use, keeps the result, and loads it.

Knows compilers, folders and libraries; knows no kernel. A library is kept in the user's cache folder under a
name that changes with the sources, the compiler, its flags, the CPU's features and the OpenMP runtime. It is
code, so it is loaded only from a folder and a file that nobody else can write, and only if it is whole. Where
the cache folder can't be used, each process builds its own in a private temporary folder.

Libraries are linked to the OpenMP runtime that torch has already loaded: with two runtimes there would be two
pools of threads that fight for the cores. Environment: CC names the compiler, XDG_CACHE_HOME the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # whose OpenMP runtime must be loaded before a library looks for one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger("hybridserve")

POINTER = ctypes.c_void_p
"""What `Tensor.data_ptr()` is passed as."""

INT = ctypes.c_int64
"""Every size, stride and number of threads."""

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers that native_math.h gives to kinds of element. Kernels of fewer, or of codes, have theirs."""

_HEADERS = Path(__file__).resolve().parent
_DIGEST_BYTES = hashlib.sha256().digest_size
_SECONDS_TO_COMPILE = 300
_SECONDS_TO_NOTICE = 0.05
_SECONDS_TO_END = 5


class BuildError(Exception):
    """Why there is no library; one line that a user can read."""


def load(source: Path, functions: Mapping[str, Sequence[type[Any]]]) -> ctypes.CDLL:
    """The library of a C source, built if need be; its `functions`, by argument types, return nothing.

    A call releases the interpreter's lock. RuntimeError with the reason if there can't be a library.
    """
    prepare([source])
    library = _known()[source]
    if isinstance(library, str):
        raise RuntimeError(f"{source}: {library}")
    return declare(library, functions)


def obstacle(*wanted: Path) -> str | None:
    """Why one of the libraries of these C sources can't be had here, or None; builds them if need be."""
    prepare(wanted)
    libraries = [_known()[source] for source in wanted]
    return next((library for library in libraries if isinstance(library, str)), None)


def prepare(wanted: Iterable[Path]) -> None:
    """Find or build several libraries at once, sooner than one after another; those that can't be had too."""
    known = _known()
    known.update(open_libraries(source for source in wanted if source not in known))


@functools.cache
def _known() -> dict[Path, ctypes.CDLL | str]:
    """What this process has asked for: a compiler that fails is not asked again by every engine."""
    return {}


def open_library(source: Path) -> ctypes.CDLL:
    """Find or build, and load; asks the environment anew on every call. Raises BuildError."""
    library = open_libraries([source])[source]
    if isinstance(library, str):
        raise BuildError(library)
    return library


def open_libraries(wanted: Iterable[Path]) -> dict[Path, ctypes.CDLL | str]:
    """The library of every source, or why there is none; asks the environment anew on every call."""
    opened: dict[Path, ctypes.CDLL | str] = {}
    recipes = []
    for source in dict.fromkeys(wanted):
        try:
            recipes.append(_Recipe.of(source))
        except BuildError as error:
            opened[source] = str(error)
    if not recipes:
        return opened
    try:
        return opened | _from_cache(recipes, _cache_folder())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        reason = error
    with tempfile.TemporaryDirectory(prefix="hybridserve-") as folder:  # a loaded file may be removed
        for source, built in _compile(recipes, Path(folder), f"for this process only: {reason}").items():
            try:
                opened[source] = built if isinstance(built, str) else ctypes.CDLL(str(built))
            except OSError as error:
                opened[source] = f"a library can't be loaded ({error})"
    return opened


@contextlib.contextmanager
def noting(note: Callable[[Callable[..., None], tuple[Any, ...]], None]) -> Iterator[None]:
    """Every call of a loaded library's function by this thread is noted, with its arguments, after it was
    made. One thread at a time: others wait. Functions of a library that is loaded meanwhile are not noted."""
    functions: list[Any] = [
        function
        for library in list(_known().values())  # other threads may be loading
        if not isinstance(library, str)
        for function in list(vars(library).values())
        if isinstance(function, ctypes._CFuncPtr)  # type: ignore[attr-defined]
    ]
    noters = _noters()
    with _noting_lock():
        noters[threading.get_ident()] = note
        for function in functions:
            function.errcheck = _made
        try:
            yield
        finally:
            for function in functions:
                del function.errcheck
            del noters[threading.get_ident()]


def _made(result: None, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Stays as long as the process: a call that another thread has begun would come here, where errcheck has
    been deleted, too, and ctypes keeps no reference to it."""
    note = _noters().get(threading.get_ident())
    if note is not None:
        note(function, arguments)


@functools.cache
def _noters() -> dict[int, Callable[[Callable[..., None], tuple[Any, ...]], None]]:
    """By thread."""
    return {}


@functools.cache
def _noting_lock() -> threading.Lock:
    return threading.Lock()


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
        wanted = os.environ.get("CC", "")
        try:
            compiler = tuple(shlex.split(wanted)) or ("cc",)
        except ValueError as error:
            raise BuildError(
                f"no C compiler (CC={' '.join(wanted.split())} is no command: {error})"
            ) from None
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
    def kernels(self) -> str:
        """What is in it, for people: an operator, and a kind of element where it has a library for each."""
        operator, part = self.source.parent.name, self.source.stem
        return operator if part == "native" else f"{operator} {part}"

    @property
    def name(self) -> str:
        return f"{self.kernels.replace(' ', '-')}-{self.key[:32]}.so"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "hybridserve" / "native"


def _from_cache(recipes: Sequence[_Recipe], folder: Path) -> dict[Path, ctypes.CDLL | str]:
    """Each source's library, or why it can't be built. Raises OSError if the folder can't be used."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _only_we_write(folder.stat()):
        raise PermissionError(f"{folder} can be written by others")
    opened: dict[Path, ctypes.CDLL | str] = {}

    def absent() -> list[_Recipe]:
        for recipe in recipes:
            if recipe.source not in opened:
                with contextlib.suppress(OSError):  # not there, or to be replaced
                    opened[recipe.source] = _open_whole(folder / recipe.name)
        return [recipe for recipe in recipes if recipe.source not in opened]

    if not absent():
        return opened
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob("tmp*"):  # nobody else builds now: of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if not (missing := absent()):  # built by another process meanwhile
            return opened
        with tempfile.TemporaryDirectory(prefix="tmp", dir=folder) as scratch:
            results = _compile(missing, Path(scratch), "once")
            for recipe in missing:
                built = results[recipe.source]
                if isinstance(built, str):
                    opened[recipe.source] = built
                else:
                    _keep(built, folder / recipe.name)
    for recipe in missing:
        if recipe.source not in opened:
            opened[recipe.source] = _open_whole(folder / recipe.name)
    return opened


def _keep(built: Path, path: Path) -> None:
    """Put a library in its place, whole or not at all, as a file that `_open_whole` accepts."""
    with built.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
    built.chmod(0o700)  # a linker leaves to the umask who may write it
    built.replace(path)


def _open_whole(path: Path) -> ctypes.CDLL:
    """A library that is ours, and as it was written; the digest at its end says so. Otherwise OSError."""
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path} is not a regular file")
    if not _only_we_write(info):
        raise PermissionError(f"{path} can be written by others")
    content = path.read_bytes()
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise OSError(f"{path} is not as it was written")
    return ctypes.CDLL(str(path))


def _only_we_write(info: os.stat_result) -> bool:
    return info.st_uid in (0, os.geteuid()) and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(recipes: Sequence[_Recipe], folder: Path, where: str) -> dict[Path, Path | str]:
    """Build in `folder`, several at once: each source's library, or the compiler's first complaint.

    Threads do the work, which no interrupt reaches: it ends the calling thread's wait, and that ends the
    compilers, before anything else is cleaned up.
    """
    names = ", ".join(sorted(recipe.kernels for recipe in recipes))
    threads = "" if recipes[0].threaded else ", for one thread (no OpenMP runtime of torch to link with)"
    # A warning, so that it is seen where no logging is set up: this start takes longer than the next.
    logger.warning("building C kernels, %s (%s)%s", where, names, threads)
    stop = threading.Event()
    pool = ThreadPoolExecutor(min(len(recipes), os.cpu_count() or 1))
    try:
        results = pool.map(lambda recipe: _compile_one(recipe, folder, stop), recipes)
        return {recipe.source: result for recipe, result in zip(recipes, results, strict=True)}
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _compile_one(recipe: _Recipe, folder: Path, stop: threading.Event) -> Path | str:
    scratch = Path(tempfile.mkdtemp(dir=folder))
    compiled, linked = scratch / "kernels.o", scratch / "kernels.so"
    compile_files = [f"-I{_HEADERS}", "-c", "-o", str(compiled), str(recipe.source)]
    # Without -fopenmp, which would link the compiler's own runtime.
    link_files = ["-o", str(linked), str(compiled), *recipe.link_flags]
    try:
        for arguments, file in (([*recipe.compile_flags, *compile_files], compiled), (link_files, linked)):
            _run([*recipe.compiler, *arguments], stop, scratch)
            if not file.is_file():
                raise BuildError(f"C compiler {recipe.compiler[0]} writes no file")
    except BuildError as error:
        return str(error)
    return linked


def _run(command: list[str], stop: threading.Event, scratch: Path | None = None) -> str:
    """Standard output of a compiler, which may use the folder `scratch`. Raises BuildError, also soon after
    `stop` is set; however it ends, the compiler and all that it started have ended then."""
    environment = {**os.environ, "LC_ALL": "C"} | ({} if scratch is None else {"TMPDIR": str(scratch)})
    deadline = time.monotonic() + _SECONDS_TO_COMPILE
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,  # to be killed with its children
        )
    except OSError as error:
        raise BuildError(f"C compiler {command[0]} can't be run ({error})") from None
    try:
        while True:
            try:
                output, errors = process.communicate(timeout=_SECONDS_TO_NOTICE)
                break
            except subprocess.TimeoutExpired:
                if stop.is_set() or time.monotonic() > deadline:
                    reason = "interrupted" if stop.is_set() else f"not done in {_SECONDS_TO_COMPILE} s"
                    raise BuildError(f"C compiler {command[0]} is ended ({reason})") from None
    finally:
        if process.returncode is None:
            _kill(process)
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        complaint = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildError(f"C compiler {command[0]} fails ({complaint or f'status {process.returncode}'})")
    return output


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and its group. The last of them to end is the last to close the pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a daemon that left the group may hold them
        process.communicate(timeout=_SECONDS_TO_END)


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], threading.Event())


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

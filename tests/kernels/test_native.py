"""C sources are built once, kept, and loaded only where nobody else could have written them."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels import native

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

KERNELS = Path(native.__file__).resolve().parent
COMPILER = os.environ.get("CC", "cc").split()[0]
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler ({COMPILER})")

TWICE = """
#include "native.h"
EXPORT void twice(const float *x, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = 2 * x[i];
}
"""

MEETING = """
#include "native.h"
#include <time.h>
EXPORT void meet(int64_t *begun, int64_t *met) {
  const time_t start = time(0);
  __atomic_add_fetch(begun, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(begun, __ATOMIC_SEQ_CST) < 2 && time(0) < start + 20) {}
  *met = __atomic_load_n(begun, __ATOMIC_SEQ_CST) == 2;
}
"""

WRITE_NONSENSE = 'for a; do [ "$last" = -o ] && echo nonsense > "$a"; last=$a; done; exit 0'
"""What a compiler's script does for it."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel of its own, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "toy" / "native.c"
    path.parent.mkdir()
    path.write_text(TWICE)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hybridserve" / "native"


@pytest.fixture
def built(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines about compiling since it was last asked."""

    def lines() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == "hybridserve"]
        caplog.clear()
        return messages

    caplog.set_level(logging.DEBUG, "hybridserve")
    return lines


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def works(library: ctypes.CDLL) -> bool:
    native.declare(library, {"twice": (native.POINTER, native.POINTER, native.INT)})
    x, y = torch.arange(5.0), torch.empty(5)
    library.twice(x.data_ptr(), y.data_ptr(), 5)
    return torch.equal(y, 2 * x)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.so"))


@needs_compiler
def test_is_built_once_and_kept(source: Path, folder: Path, built: Callable[[], list[str]]) -> None:
    assert works(native.open_library(source))
    (line,) = built()
    assert line == "building C kernels, once (toy)"
    (name,) = kept(folder)
    assert name.startswith("toy-")
    assert {path.name for path in folder.iterdir()} == {name, "lock"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert works(native.open_library(source))
    assert built() == []


@needs_compiler
def test_home_is_used_without_xdg(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert works(native.open_library(source))
    assert len(kept(tmp_path / "home" / ".cache" / "hybridserve" / "native")) == 1


@needs_compiler
def test_every_ingredient_changes_the_name(
    source: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.open_library(source)

    def is_new() -> bool:
        before = kept(folder)
        assert works(native.open_library(source))
        return len(kept(folder)) == len(before) + 1

    assert not is_new()
    source.write_text(TWICE + "\n")
    assert is_new()
    (source.parent / "own.h").write_text("")
    assert is_new()
    monkeypatch.setattr(native, "_cpu_features", lambda: "flags: sse2")
    assert is_new()
    monkeypatch.setenv("CC", f"{COMPILER} -DX")
    assert is_new()
    monkeypatch.setenv(
        "CC", compiler(tmp_path / "cc-2", f'[ "$1" = --version ] && echo 2 || {COMPILER} "$@"')
    )
    assert is_new()
    monkeypatch.setattr(native, "_openmp_runtime", lambda version: None)
    assert is_new()
    assert not is_new()


@needs_compiler
def test_another_cpu_has_its_own(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[[], list[str]]
) -> None:
    """As in a home that two machines share: what one has built may be an illegal instruction on the other."""
    features = native._cpu_features()
    assert features.startswith(("flags", "Features"))
    assert len(features.split()) > 10
    native.open_library(source)
    mine = kept(folder)
    monkeypatch.setattr(native, "_cpu_features", lambda: features + " avx99")
    built()
    assert works(native.open_library(source))
    assert built() == ["building C kernels, once (toy)"]
    assert set(mine) < set(kept(folder))
    monkeypatch.setattr(native, "_cpu_features", lambda: features)
    assert works(native.open_library(source))
    assert built() == []


@needs_compiler
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc")
def test_cpuinfo_decides_what_is_loaded(
    source: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: Callable[[], list[str]],
) -> None:
    """The features as the system's file has them; what else it says, such as frequencies, changes nothing.
    Where they differ, what another CPU has built stays, under its name, and another library is built."""
    cpuinfo = tmp_path / "cpuinfo"
    real_read = Path.read_text

    def read(path: Path, *args: str, **kwargs: str) -> str:
        return real_read(cpuinfo if path == Path("/proc/cpuinfo") else path, *args, **kwargs)

    def open_on(features: str, megahertz: int) -> list[str]:
        """The lines about compiling, on a CPU of this description that has just started the process."""
        cpuinfo.write_text(f"processor\t: 0\ncpu MHz\t\t: {megahertz}\n{features}\n\nprocessor\t: 1\n")
        native._cpu_features.cache_clear()
        built()
        assert works(native.open_library(source))
        return built()

    monkeypatch.setattr(Path, "read_text", read)
    try:
        for field in ("flags\t\t", "Features\t"):  # x86 and Arm
            assert len(open_on(f"{field}: one two", 2000)) == 1
            assert open_on(f"{field}: one two", 3000) == []
            theirs = kept(folder)
            assert len(open_on(f"{field}: one two three", 3000)) == 1
            assert set(theirs) < set(kept(folder))
            assert open_on(f"{field}: one two", 3000) == []
    finally:
        native._cpu_features.cache_clear()


@needs_compiler
def test_a_call_lets_other_threads_run(source: Path) -> None:
    """Two calls meet inside of the library: each waits until the other has begun."""
    source.write_text(MEETING)
    library = native.declare(native.open_library(source), {"meet": (native.POINTER, native.POINTER)})
    begun, met = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda place: library.meet(begun.data_ptr(), met[place:].data_ptr()), range(2)))
    assert met.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["no-such-compiler", "/no/such/compiler -O1"])
def test_no_compiler(source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", name)
    with pytest.raises(native.BuildError, match=f"no C compiler .*{name.split()[0]}"):
        native.open_library(source)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'a warning: x' >&2; echo 'native.c:3:1: error: boom' >&2; exit 1",
            "native.c:3:1: error: boom",
        ),
        ("echo 'license expired' >&2; exit 1", "license expired"),
        ("exit 3", "status 3"),
        (WRITE_NONSENSE, "can't be loaded"),
    ],
)
def test_a_broken_compiler_is_a_reason(
    source: Path, tmp_path: Path, script: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "cc-broken", script))
    with pytest.raises(native.BuildError) as error:
        native.open_library(source)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("step", ["-c", "-shared"])
def test_a_compiler_that_writes_nothing_is_asked_once(
    source: Path, tmp_path: Path, step: str, built: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = f"for a; do [ $a = {step} ] && exit 0; done; {WRITE_NONSENSE}"
    monkeypatch.setenv("CC", compiler(tmp_path / "cc-lazy", lazy))
    with pytest.raises(native.BuildError, match=r"^C compiler .*cc-lazy writes no file$"):
        native.open_library(source)
    assert len(built()) == 1


def test_a_compiler_that_is_no_command(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(native.BuildError, match=r"CC=gcc \" .*No closing quotation"):
        native.open_library(source)
    assert "CC" in (native.obstacle(source) or "")


def test_a_compiler_that_is_no_program(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc-no-program"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(native.BuildError, match="can't be run"):
        native.open_library(source)


@needs_compiler
def test_an_error_in_the_source_is_its_first_line(source: Path, folder: Path) -> None:
    source.write_text("int a;\nint b = nothing;\nint c = nothing_either;\n")
    with pytest.raises(native.BuildError, match=r"native\.c:2.*nothing.*undeclared"):
        native.open_library(source)
    assert kept(folder) == []
    assert native.obstacle(source)
    with pytest.raises(RuntimeError, match="undeclared"):
        native.load(source, {})


@needs_compiler
def test_a_home_that_cannot_be_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[[], list[str]]
) -> None:
    """Read-only, missing or full: the library is built in a folder that is gone when it is loaded."""
    (tmp_path / "file").write_text("")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert works(native.open_library(source))
    assert "for this process only" in built()[0]
    assert list(temporary.iterdir()) == []


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_home(source: Path, folder: Path, built: Callable[[], list[str]]) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert works(native.open_library(source))
    assert "for this process only" in built()[0]


@needs_compiler
def test_a_warm_read_only_home(source: Path, folder: Path, built: Callable[[], list[str]]) -> None:
    native.open_library(source)
    (folder / "lock").unlink()
    folder.chmod(0o500)
    built()
    assert works(native.open_library(source))
    assert built() == []
    assert not (folder / "lock").exists()


@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_refused(
    source: Path, folder: Path, mode: int, built: Callable[[], list[str]]
) -> None:
    """Not even a file with the right name and digest is loaded from there."""
    native.open_library(source)
    (name,) = kept(folder)
    content = (folder / name).read_bytes()
    folder.chmod(mode)
    built()
    assert works(native.open_library(source))
    (line,) = built()
    assert "can be written by others" in line
    assert "for this process only" in line
    assert (folder / name).read_bytes() == content


@needs_compiler
@pytest.mark.parametrize("mask", [0o002, 0o000])
def test_kept_under_any_umask(source: Path, folder: Path, mask: int, built: Callable[[], list[str]]) -> None:
    """The linker lets the group write where the umask does."""
    before = os.umask(mask)
    try:
        assert works(native.open_library(source))
        assert len(built()) == 1
        assert works(native.open_library(source))
        assert built() == []
    finally:
        os.umask(before)
    assert (folder / kept(folder)[0]).stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize(
    ("mode", "content", "reason"),
    [(0o770, None, "can be written by others"), (0o700, b"short", "not as it was written")],
)
def test_a_refused_file_says_why(
    source: Path, folder: Path, mode: int, content: bytes | None, reason: str
) -> None:
    native.open_library(source)
    path = folder / kept(folder)[0]
    content = content or path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(OSError, match=f"{path.name} .*{reason}"):
        native._open_whole(path)


@needs_compiler
def test_what_an_ended_build_left_is_removed(source: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (folder / "tmpdead").mkdir()
    (folder / "tmpdead" / "kernels.o").write_text("")
    native.open_library(source)
    assert {path.name for path in folder.iterdir()} == {*kept(folder), "lock"}


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "link", "group"])
def test_a_damaged_file_is_built_again(
    source: Path, folder: Path, damage: str, built: Callable[[], list[str]]
) -> None:
    native.open_library(source)
    path = folder / kept(folder)[0]
    content = path.read_bytes()
    # In a new file: this process has the old one mapped.
    path.unlink()
    if damage == "link":
        (folder / "elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    else:
        flipped = content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]
        path.write_bytes(
            {"truncated": content[:-4000], "flipped": flipped, "empty": b""}.get(damage, content)
        )
        path.chmod(0o770 if damage == "group" else 0o700)
    built()
    assert works(native.open_library(source))
    assert len(built()) == 1
    assert path.is_file()
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o022 == 0
    assert works(native.open_library(source))
    assert built() == []


@needs_compiler
def test_builds_at_once_are_one_build(
    source: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    counting = f'[ "$1" = --version ] || {{ echo "$@" >> {calls}; sleep 0.2; }}; exec {COMPILER} "$@"'
    monkeypatch.setenv("CC", compiler(tmp_path / "cc-counting", counting))
    with ThreadPoolExecutor(4) as pool:  # locks of a file are between its openings, also in one process
        libraries = list(pool.map(native.open_library, [source] * 4))
    assert all(works(library) for library in libraries)
    assert len(calls.read_text().splitlines()) == 2  # compiled, linked
    assert len(kept(folder)) == 1


def toys(source: Path) -> list[Path]:
    """The kernel under three names."""
    sources = [source.parent.parent / name / "native.c" for name in ("toy", "second", "broken")]
    for path in sources[1:]:
        path.parent.mkdir()
        path.write_text("nonsense" if path.parent.name == "broken" else TWICE)
    return sources


@needs_compiler
def test_several_are_built_side_by_side(
    source: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: Callable[[], list[str]],
) -> None:
    """Each waits until all have begun. One line tells of all; one that fails is no harm to the others."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    begun = tmp_path / "begun"
    begun.mkdir()
    meeting = f"touch {begun}/$$; until [ $(ls {begun} | wc -l) -ge 3 ]; do sleep 0.05; done"
    script = f'[ "$1" = --version ] || {{ {meeting}; }}; exec {COMPILER} "$@"'
    monkeypatch.setenv("CC", compiler(tmp_path / "cc-meeting", script))
    monkeypatch.setattr(native, "_SECONDS_TO_COMPILE", 20)
    sources = toys(source)
    native.prepare(sources)
    assert built() == ["building C kernels, once (broken, second, toy)"]
    assert len(kept(folder)) == 2
    monkeypatch.setenv("CC", "no-such-compiler")  # from here on nothing is built
    assert [native.obstacle(path) is None for path in sources] == [True, True, False]
    assert all(works(native.load(path, {})) for path in sources[:2])
    assert "nonsense" in (native.obstacle(sources[2]) or "") or "error" in (native.obstacle(sources[2]) or "")
    native.prepare(sources)
    assert built() == []


THREADS = """
#include "native.h"
#include <omp.h>
EXPORT void count(int64_t num_threads, int64_t *counted) {
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    *counted = omp_get_num_threads();
  }
}
"""


@needs_compiler
@pytest.mark.skipif(native._openmp_runtime("") is None, reason="torch has no OpenMP runtime to share")
def test_one_pool_of_threads(source: Path) -> None:
    """The library uses the runtime that torch has loaded, and no second one is mapped."""
    source.write_text(THREADS)
    library = native.declare(native.open_library(source), {"count": (native.INT, native.POINTER)})
    counted = torch.zeros(1, dtype=torch.int64)
    for num_threads in (1, 2):
        library.count(num_threads, counted.data_ptr())
        assert counted.item() == num_threads
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {
        line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line
    }
    assert len(runtimes) == 1


@needs_compiler
def test_without_openmp_there_is_one_thread(
    source: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(native, "_openmp_runtime", lambda version: None)
    source.write_text(THREADS.replace("omp_get_num_threads()", "1").replace("#include <omp.h>", ""))
    library = native.declare(native.open_library(source), {"count": (native.INT, native.POINTER)})
    counted = torch.zeros(1, dtype=torch.int64)
    library.count(8, counted.data_ptr())
    assert counted.item() == 1
    assert "for one thread" in built()[0]


def test_runtimes_by_compiler() -> None:
    """Clang's calls are not in GNU's runtime; both compilers' are in LLVM's."""
    found = native._openmp_runtime("gcc (Debian) 12")
    assert native._openmp_runtime("clang version 16") == (
        None if found and Path(found).name.startswith("libgomp") else found
    )

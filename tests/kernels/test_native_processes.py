"""C kernels as whole programs meet them: at once, interrupted, without a compiler, under sanitizers."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridserve.kernels import native

KERNELS = Path(native.__file__).resolve().parent
COMMAND = shlex.split(os.environ.get("CC", "")) or ["cc"]
COMPILER = COMMAND[0]
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler ({COMPILER})")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, for this test's programs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybridserve"


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_an_interrupted_build_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither folders nor processes: a driver's own children, which get no signal of their own, end too."""
    pids = tmp_path / "pids"
    script = f'[ "$1" = --version ] || {{ sleep 60 & echo $! $$ >> {pids}; wait; }}'
    monkeypatch.setenv("CC", compiler(tmp_path / "cc-sleeping", script))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    code = "from hybridserve.cli import main; main(['generate', 'demo', '--prompt', 'x'])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    (line,) = errors.splitlines()
    assert line.startswith("building C kernels")
    assert [path.name for path in (cache / "native").iterdir()] == ["lock"]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not any(is_running(pid) for pid in pids.read_text().split())


def test_a_plan_prepares_all_that_it_uses(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that fails at once, so that it takes no time: one line, and torch runs all."""
    monkeypatch.setenv("CC", "true")
    code = "from hybridserve.cli import main; main(['plan', 'demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = "attention, gemm, gemm bfloat16, lora, moe, pointwise, ssm"
    assert done.stderr == f"building C kernels, once ({names})\n"
    assert done.stdout.count("not native: C compiler true writes no file") == 6


@needs_compiler
@pytest.mark.slow
def test_processes_at_once_are_one_build(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "toy" / "native.c"
    source.parent.mkdir()
    source.write_text('#include "native.h"\n')
    calls = tmp_path / "calls"
    counting = f'[ "$1" = --version ] || {{ echo "$@" >> {calls}; sleep 1; }}; exec {COMPILER} "$@"'
    monkeypatch.setenv("CC", compiler(tmp_path / "cc-counting", counting))
    code = "import sys, pathlib; from hybridserve.kernels import native; "
    code += "sys.exit(native.obstacle(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-W", "error", "-c", code, str(source)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    complaints = "".join(process.communicate()[1] for process in processes)
    assert [process.returncode for process in processes] == [0, 0, 0], complaints
    assert complaints.count("building C kernels") == 1
    assert len(calls.read_text().splitlines()) == 2
    assert len(list((cache / "native").glob("*.so"))) == 1


MEASURE = """
import resource, sys, time
from hybridserve.engine.planner import OPERATORS
from hybridserve.kernels import native, registry
wanted = registry.sources(OPERATORS, registry.Capabilities("cpu", sys.argv[1], sys.argv[2]))
start = time.perf_counter()
native.prepare(wanted)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
sys.stdout.write(f"{len(wanted)} {usage.ru_utime + usage.ru_stime} {time.perf_counter() - start}")
sys.exit(native.obstacle(*wanted))
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the time was measured on x86")
@pytest.mark.parametrize("weights", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_build_takes_seconds(cache: Path, dtype: str, weights: str) -> None:
    """All that an engine with adapters runs. Compilers' own time, which busy neighbours change little: twice
    the five seconds that two cores may take."""
    command = [sys.executable, "-c", MEASURE, dtype, weights]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("building C kernels, once (") == 1
    num_libraries, seconds, _ = done.stdout.split()
    assert len(list((cache / "native").glob("*.so"))) == int(num_libraries)
    assert float(seconds) < 10


def test_without_a_compiler_torch_is_used() -> None:
    """The whole way, in a process that asks for the first time: no warning, no traceback, and the reason."""
    code = (
        "from hybridserve.kernels.registry import Capabilities, select\n"
        "for op in ('gemm', 'moe', 'ssm', 'attention', 'pointwise'):\n"
        "    choice = select(op, 'auto', Capabilities('cpu', 'float32'))\n"
        "    print(choice.name, dict(choice.rejected)['native'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert line.startswith("torch_native no C compiler (no-such-compiler")


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are x86's")
@pytest.mark.parametrize("machine", ["x86-64", "skylake-avx512", "icelake-server", "sapphirerapids"])
def test_kernels_are_code_for_other_processors(machine: str) -> None:
    """What this one may not be able to run: types and builtins of the branches that it does not take."""
    flags = ["-std=gnu11", f"-march={machine}", "-fsyntax-only", "-fopenmp", f"-I{KERNELS}", "-x", "c"]
    known = subprocess.run([COMPILER, *flags, os.devnull], capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip(f"the compiler does not know {machine}")
    sources = sorted(KERNELS.glob("*/*.c"))
    assert sources
    for source in sources:
        command = [COMPILER, *flags, "-Wall", "-Werror", "-Wno-unknown-pragmas", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]


def build_flags(build: str) -> list[str]:
    """Of this CPU's code (native), of what one without AVX runs (portable), or of what one with AVX-512, with
    and without VNNI, would run: taken apart into AVX2 by native_avx512.h."""
    if build == "native":
        return []
    if platform.machine() != "x86_64":
        pytest.skip("the flags are x86's")
    if build == "portable":
        return ["-mno-avx"]
    flags = ["-include", str(Path(__file__).with_name("native_avx512.h"))]
    flags += ["-DWITHOUT_VNNI"] if build == "avx512bw" else []
    check = [*COMMAND, "-march=native", *flags, "-fsyntax-only", "-x", "c", os.devnull]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"AVX-512 can't be taken apart here: {done.stderr.partition('#error')[2][:200].strip()}")
    return flags


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("build", ["native", "portable", "avx512"])
@pytest.mark.parametrize("driver", ["native_driver.c", "native_lora_driver.c", "native_sequence_driver.c"])
def test_no_sanitizer_complains(tmp_path: Path, driver: str, build: str) -> None:
    """The kernels over odd sizes in exactly sized memory, compared with plain loops. Vectors that are taken
    apart are too much work for sanitizers: minutes of compiling."""
    program = tmp_path / "driver"
    command = [
        COMPILER,
        "-std=gnu11",
        "-O1",
        "-fopenmp",
        *([] if build == "avx512" else ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]),
        "-march=native" if platform.machine() == "x86_64" else "-mcpu=native",
        *build_flags(build),
    ]
    command += [f"-I{KERNELS}", "-o", str(program)]
    built = subprocess.run(
        [*command, str(Path(__file__).with_name(driver)), "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.startswith("ok")


FEWER_THREADS = """
import torch
from hybridserve.kernels import gemm, moe

torch.use_deterministic_algorithms(True)  # results are NaN before they are written
products, experts = gemm.Native(), moe.Native()
weight, x = torch.randn(1000, 300), torch.randn(5, 300)
packed = experts.pack(torch.randn(4, 256, 96), torch.randn(4, 96, 128))
rows = torch.randn(50, 96)
weights, ids = experts.route(torch.randn(50, 4), 2, renormalize=True)
torch.set_num_threads(1)
alone = products.linear(x, weight, None), experts.experts(rows, weights, ids, *packed)
torch.set_num_threads(5)
assert torch.equal(products.linear(x, weight, None), alone[0])
assert torch.equal(experts.experts(rows, weights, ids, *packed), alone[1])
"""


@needs_compiler
def test_fewer_threads_than_were_asked_for_do_all_the_work() -> None:
    """A runtime may give fewer: what would have been the others' is done all the same."""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FEWER_THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"


@pytest.mark.nightly
@pytest.mark.parametrize("driver", ["native_driver.c", "native_lora_driver.c", "native_sequence_driver.c"])
def test_arm_code_in_an_emulator(tmp_path: Path, driver: str) -> None:
    """NEON, compared with plain loops. Debian: gcc-aarch64-linux-gnu, qemu-user-static."""
    for program in (ARM_COMPILER, ARM_EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    program = str(tmp_path / "driver")
    source = str(Path(__file__).with_name(driver))
    command = [
        ARM_COMPILER,
        "-std=gnu11",
        "-O2",
        "-static",
        "-fopenmp",
        f"-I{KERNELS}",
        "-o",
        program,
        source,
    ]
    built = subprocess.run([*command, "-lm"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[:4000]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [ARM_EMULATOR, program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.startswith("ok")


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("build", ["portable", "avx512", "avx512bw"])
@pytest.mark.parametrize(
    "operator", ["attention", "gemm", "lora", "moe", "native_codes", "panels", "pointwise", "ssm", "ssd"]
)
def test_other_builds_pass_the_operators_tests(operator: str, build: str) -> None:
    """What CPUs with narrower and wider vectors run, against the references: all that is asked of this CPU's
    code, odd sizes and poisoned memory included."""
    command = [*COMMAND, *build_flags(build)]
    macros = [*command, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    defined = subprocess.run(macros, capture_output=True, text=True, check=True).stdout
    assert ("__AVX__" in defined, "__AVX512F__" in defined) == (
        (False,) * 2 if build == "portable" else (True,) * 2
    )
    suite = Path(__file__).with_name(f"test_{operator}.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(suite)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CC": shlex.join(command)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]

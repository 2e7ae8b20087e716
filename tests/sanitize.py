"""The kernel tests under NVIDIA's compute-sanitizer, some in each of several processes.

    python -m tests.sanitize --tool memcheck
    python -m tests.sanitize --tool racecheck --part 1/3 --seconds 550

Exits with 1 if a test fails, the sanitizer reports an error or no test passes, as without a GPU.
What is not reached in time is counted and said. Large cases are smaller (`SANITIZED` in
tests/kernels/devices.py). memcheck runs without torch's memory pool, which would hide what is read
or written past the end of a tensor. racecheck leaves out the kernels of torch and its libraries: it
does not follow the barriers by which Hopper's matrix products wait, and reports those.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts="]
#: Tests that launch kernels by themselves, without an engine and its captured graphs.
TESTS = ["tests/kernels", "tests/attention"]
TESTS += ["tests/models/test_fp8.py::test_products_on_cuda"]
TESTS += ["tests/models/test_fp8.py::test_kernels_on_cuda"]
#: Cases of the torch backend, which is no kernel of ours.
REFERENCE = re.compile(r"[\[-]torch[\]-]")
ENVIRONMENT = {**os.environ, "TEST_SANITIZED": "1", "OMP_NUM_THREADS": "1"}
#: Parts of the (mangled) names of kernels that are not this project's.
LIBRARIES = ["nvjet", "gemm", "gemv", "cutlass", "cublas", "_ZN2at", "_ZN3cub"]
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def collect(tests: list[str]) -> list[str]:
    """Names of the GPU tests."""
    told = subprocess.run(
        [*PYTEST, "--collect-only", "-q", *tests],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    names = [line for line in told.stdout.splitlines() if "::" in line]
    return [name for name in names if not REFERENCE.search(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tool", choices=["memcheck", "racecheck"], default="memcheck")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--seconds", type=float, default=3600, help="stop then")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th test, from the K-th")
    parser.add_argument("--logs", type=Path, help="folder for what the processes print")
    parser.add_argument("tests", nargs="*", default=TESTS)
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer, a part of the CUDA toolkit, is not on the path")
    part, parts = map(int, options.part.split("/"))
    names = collect(options.tests)[part - 1 :: parts]
    logs = options.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    environment = dict(ENVIRONMENT)
    excluded = [word for name in LIBRARIES for word in ("--kernel-name-exclude", f"kns={name}")]
    if options.tool == "memcheck":
        excluded = []
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    end, processes = time.monotonic() + options.seconds, []
    for job in range(min(options.jobs, len(names))):
        command = ["compute-sanitizer", "--tool", options.tool, *excluded, *PYTEST, "-v"]
        with (logs / f"{options.tool}-{job}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *names[job :: options.jobs]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        processes.append((process, Path(log.name)))
    passed = bad = cut = 0
    for process, log in processes:
        stopped = False
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = True
            os.killpg(process.pid, signal.SIGINT)  # pytest and the sanitizer then sum up
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        text = log.read_text(errors="replace")
        done, summary = len(re.findall(r" PASSED", text)), SUMMARY.search(text)
        passed, cut = passed + done, cut + (summary is None)
        wrong = summary is not None and summary.group(1) != "0"
        wrong |= bool(re.search(r"^=+ (Invalid|Error|Warning|Program hit)|\bFAILED\b", text, re.M))
        wrong |= process.returncode != 0 and not stopped
        bad += wrong
        if wrong:
            print(f"{log}:\n{text[-3000:]}")
    print(
        f"{options.tool}: {passed} of {len(names)} tests passed; errors or failures in {bad} of "
        f"{len(processes)} processes; {cut} cut off before their summary"
    )
    return int(bad > 0 or not passed)


if __name__ == "__main__":
    sys.exit(main())

"""Native CPU kernels: plain C with OpenMP, compiled once per machine and cached.

The `*.c` files of this folder are compiled together by the system's C compiler the first time
they are needed (a few seconds) and kept under ``$ZIPAGE_CACHE`` (default ``~/.cache/zipage``).
A machine without a compiler runs on the torch backend instead: slower, same results.

OpenMP symbols resolve to the runtime torch has already loaded, so both share one thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (loads the OpenMP runtime the kernels share)

from zipage.errors import ZipageError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    # Fast, but without -ffast-math: that would make every thread of the process flush denormals.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-fopenmp",
)


class NativeUnavailable(ZipageError, RuntimeError):
    """The native kernels cannot be built here; the message says why."""


def _cache_dir() -> Path:
    root = os.environ.get("ZIPAGE_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "zipage"


def _cpu_name() -> str:
    """What `-march=native` depends on, so that a shared home never serves a foreign binary."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = ("model name", "flags", "Features")
            kept = {line.strip() for line in lines if line.startswith(names)}
        return "|".join(sorted(kept))
    except OSError:
        return platform.processor()


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Return the compiled kernel library, building it first if no cached build fits.

    Raises:
        NativeUnavailable: no C compiler, not Linux, or the build failed.
    """
    if platform.system() != "Linux":
        raise NativeUnavailable("native kernels are built on Linux only")
    if os.environ.get("ZIPAGE_NATIVE", "1") == "0":
        raise NativeUnavailable("switched off by ZIPAGE_NATIVE=0")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise NativeUnavailable("no C compiler found (looked for $CC, cc and gcc)")
    sources = sorted(_FOLDER.glob("*.c"))
    digest = hashlib.sha256("\0".join((compiler, *_FLAGS, _cpu_name())).encode())
    for path in sorted([*sources, *_FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    try:
        folder = _cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or no home at all
        folder = Path(tempfile.mkdtemp(prefix="zipage-"))
    library = folder / f"kernels-{digest.hexdigest()[:20]}.so"
    if not library.exists():
        # Built under a private name and renamed, so that two processes never see half a file.
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".tmp")
        os.close(handle)
        command = [compiler, *_FLAGS, *map(str, sources), "-o", str(partial), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise NativeUnavailable(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            os.replace(partial, library)
        finally:
            Path(partial).unlink(missing_ok=True)  # of a failed or interrupted build
        logger.info("built native kernels: %s", library)
    return ctypes.CDLL(str(library))


def available() -> bool:
    """Whether the native kernels can be used on this machine."""
    try:
        load()
    except (NativeUnavailable, OSError) as error:
        logger.info("native CPU kernels unavailable: %s", error)
        return False
    return True

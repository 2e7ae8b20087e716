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
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (loads the OpenMP runtime the kernels share)

from zipage.errors import ConfigError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    # Not -ffast-math: it would make every thread of the process flush denormals.
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
_CHECKSUM_BYTES = hashlib.sha256().digest_size
#: Errors of failed builds by library name: a build takes seconds, and every engine asks.
_failures: dict[str, str] = {}


class NativeUnavailable(ConfigError, RuntimeError):
    """The native kernels cannot be built or loaded here; the message says why."""


def _cache_dir() -> Path:
    root = os.environ.get("ZIPAGE_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "zipage"


def _cpu_name() -> str:
    """What `-march=native` depends on, so that a shared home never serves another CPU's binary."""
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

    A damaged build is replaced. If the cache folder can't be used, the library is built in a
    temporary folder, for this process alone.

    Raises:
        NativeUnavailable: no C compiler, not Linux, or the library can't be built or loaded.
    """
    if platform.system() != "Linux":
        raise NativeUnavailable("native kernels are built on Linux only")
    if _switched_off():
        raise NativeUnavailable("native kernels are switched off by ZIPAGE_NATIVE=0")
    compiler = _compiler()
    digest = hashlib.sha256("\0".join((*compiler, *_FLAGS, _cpu_name())).encode())
    for path in sorted([*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:20]}.so"
    try:
        return _load(_cache_dir() / name, compiler)
    except (OSError, RuntimeError) as error:  # read-only, not executable, or no home at all
        if isinstance(error, NativeUnavailable):
            raise
        logger.info("the cache of native kernels can't be used: %s", error)
    try:
        # A loaded library no longer needs its file.
        with tempfile.TemporaryDirectory(prefix="zipage-") as folder:
            return _load(Path(folder) / name, compiler)
    except OSError as error:
        raise NativeUnavailable(f"native kernels cannot be built or loaded: {error}") from error


def _switched_off() -> bool:
    return os.environ.get("ZIPAGE_NATIVE", "1") == "0"


def _compiler() -> list[str]:
    """The C compiler and its first arguments."""
    chosen = os.environ.get("CC", "")
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise NativeUnavailable(f"CC={chosen!r} is not a command: {error}") from None
    if words:
        return words
    found = shutil.which("cc") or shutil.which("gcc")
    if not found:
        raise NativeUnavailable(
            "native kernels need a C compiler; none was found (looked for $CC, cc and gcc)"
        )
    return [found]


def _load(library: Path, compiler: list[str]) -> ctypes.CDLL:
    """Load a library, building it if it is missing or damaged."""
    if not _is_whole(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        _build(library, compiler)
    return ctypes.CDLL(str(library))


def _is_whole(library: Path) -> bool:
    """Whether a file is as `_build` left it: a truncated one would kill the process (SIGBUS)."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = len(content) - _CHECKSUM_BYTES
    return size > 0 and hashlib.sha256(content[:size]).digest() == content[size:]


def _build(library: Path, compiler: list[str]) -> None:
    """Compile the sources; appends a checksum to the library, which loaders ignore."""
    if library.name in _failures:
        raise NativeUnavailable(_failures[library.name])
    # Built under a private name and renamed, so that two processes never see half a file.
    handle, partial = tempfile.mkstemp(dir=library.parent, suffix=".tmp")
    os.close(handle)
    sources = map(str, sorted(_FOLDER.glob("*.c")))
    command = [*compiler, *_FLAGS, *sources, "-o", partial, "-lm"]
    try:
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise NativeUnavailable(
                f"the C compiler {compiler[0]!r} (CC) cannot be run: {error}"
            ) from error
        if done.returncode != 0:
            message = f"{' '.join(command)} failed:\n{done.stderr[-2000:]}"
            _failures[library.name] = message
            raise NativeUnavailable(message)
        with open(partial, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(partial, library)
    finally:
        Path(partial).unlink(missing_ok=True)  # left by a failed or interrupted build
    logger.info("built native kernels: %s", library)


def available() -> bool:
    """Whether the native kernels can be used on this machine; if not, a warning says why."""
    try:
        load()
    except NativeUnavailable as error:
        if _switched_off():
            logger.info("%s", error)
        else:
            _warn(str(error))
        return False
    return True


@functools.lru_cache(maxsize=8)
def _warn(reason: str) -> None:
    """Warn once per reason: every engine asks several times."""
    logger.warning("slower torch code replaces the native CPU kernels: %s", reason)

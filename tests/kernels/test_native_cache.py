"""The compiled native kernels in their cache: damaged, unusable, or not to be built."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest

from zipage import LLM
from zipage.errors import ConfigError
from zipage.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs a C compiler")

#: Gives the library that is there already, and counts how often it was asked.
_COMPILER = """#!/bin/sh
echo "$1" >> {log}
while [ "$1" != "-o" ]; do shift; done
cp {library} "$2"
"""


class Cache:
    """A kernel cache of its own, with a fast compiler."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "cache"
        self.compiler = root / "a cc"
        self._log = root / "log"
        self.compiler.write_text(_COMPILER.format(log=self._log, library=native.load()._name))
        self.compiler.chmod(0o755)

    @property
    def builds(self) -> list[str]:
        """The compiler's first argument, for every build."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    @property
    def library(self) -> Path:
        (library,) = self.folder.iterdir()
        return library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path)
    monkeypatch.setenv("ZIPAGE_CACHE", str(cache.folder))
    monkeypatch.setenv("CC", f"'{cache.compiler}'")
    # Not those of the rest of the process.
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    monkeypatch.setattr(native, "_warn", native._warn.__wrapped__)
    return cache


def test_a_build_is_used_again(cache: Cache) -> None:
    assert native.load().zp_attn_forward and native.load().zp_attn_forward
    assert len(cache.builds) == 1


@pytest.mark.parametrize("size", [0, 20, 5000, -33, -1])
def test_a_truncated_library_is_built_again(cache: Cache, size: int) -> None:
    native.load()
    # Another file: this process has the old one mapped.
    content = cache.library.read_bytes()
    name = cache.library
    name.unlink()
    name.write_bytes(content[:size])
    assert native.load().zp_attn_forward
    assert len(cache.builds) == 2
    assert cache.library.read_bytes() == content


def test_a_cache_that_cannot_be_written(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    # Exists, and takes no file even of root.
    monkeypatch.setenv("ZIPAGE_CACHE", "/proc/self")
    monkeypatch.setattr("tempfile.tempdir", str(cache.folder))
    cache.folder.mkdir()
    assert native.load().zp_attn_forward
    assert len(cache.builds) == 1
    assert list(cache.folder.iterdir()) == [], "nothing is left behind"


def test_a_library_that_does_not_load_is_built_elsewhere(cache: Cache) -> None:
    native.load()
    name = cache.library
    name.unlink()
    name.mkdir()
    assert native.load().zp_attn_forward
    assert len(cache.builds) == 2


def test_compiler_with_arguments(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"'{cache.compiler}' -m64")
    assert native.load().zp_attn_forward
    assert cache.builds == ["-m64"]


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("/no/such/cc -m64", "'/no/such/cc' .*cannot be run"), ("/", "cannot be run"), ("'", "CC=")],
)
def test_without_a_compiler_torch_runs_and_a_warning_says_why(
    cache: Cache,
    compiler: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING, "zipage"):
        assert not native.available()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    with pytest.raises(ConfigError, match=words) as refused:
        LLM(attention_backend="native", num_kv_blocks=64)
    assert str(refused.value) in record.getMessage()


def test_a_compiler_that_fails_is_asked_once(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.compiler.write_text(f"#!/bin/sh\necho $1 >> {cache._log}\necho no linker >&2\nexit 1\n")
    monkeypatch.setattr(native, "_warn", functools.lru_cache(native._warn))
    caplog.set_level(logging.WARNING, "zipage")  # whatever tests of commands have left
    for _ in range(3):
        assert not native.available()
    assert len(cache.builds) == 1
    (message,) = caplog.messages
    assert "no linker" in message
    assert list(cache.folder.iterdir()) == []


def test_switched_off_is_no_warning(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZIPAGE_NATIVE", "0")
    with caplog.at_level(logging.WARNING, "zipage"):
        assert not native.available()
    assert caplog.records == []

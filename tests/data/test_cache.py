"""What is remembered of data files: found again, never trusted blindly, and never needed."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolation import own_caches

from cepo.data import cache

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache, "_has_warned", False)
    monkeypatch.setattr(cache, "SMALLEST_REMEMBERED", 0)
    monkeypatch.setattr(cache, "_pruned", set())
    with own_caches(tmp_path / "cache"):
        yield


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes in the returned list every time that a file's bytes are read for their digest."""
    noted: list[int] = []
    original = hashlib.file_digest

    def noting(file: object, name: str) -> object:
        noted.append(1)
        return original(file, name)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(hashlib, "file_digest", noting)
    return noted


def test_an_entry_is_found_again_by_its_key_and_kind() -> None:
    cache.write_entry("checks", KEY, b"\n\0content")
    assert cache.read_entry("checks", KEY) == b"\n\0content"
    assert cache.read_entry("others", KEY) is None
    assert cache.read_entry("checks", "cd" * 32) is None


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign", "folder", "link", "of another key"])
def test_a_damaged_entry_counts_as_missing(damage: str, tmp_path: Path) -> None:
    cache.write_entry("checks", KEY, b"content of an entry")
    path = cache.cache_folder() / "checks" / KEY
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "of another key":
        path.write_bytes(whole)
        path = path.rename(path.with_name("cd" * 32))
    else:
        contents = {"truncated": whole[:-3], "empty": b"", "flipped": whole[:-1] + b"X", "foreign": b"\x80\x04K\x01."}
        path.write_bytes(contents[damage])
    assert cache.read_entry("checks", path.name) is None


def test_a_digest_is_sha_256_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    noted = reads(monkeypatch)
    path = tmp_path / "rows.csv"
    path.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert [cache.content_digest(path), cache.content_digest(path)] == [expected, expected]
    assert len(noted) == 1


def test_a_small_file_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(cache, "SMALLEST_REMEMBERED", 4)
    for content in (b"abc", b"abcd"):
        (tmp_path / "rows.csv").write_bytes(content)
        assert cache.content_digest(tmp_path / "rows.csv") == hashlib.sha256(content).hexdigest()
    assert len(list((cache.cache_folder() / "digests").iterdir())) == 1


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tick of the file system's clock a second change leaves size and times as they are."""
    noted = reads(monkeypatch)
    path = tmp_path / "rows.csv"
    path.write_bytes(b"abc")
    cache.content_digest(path)
    cache.content_digest(path)
    assert len(noted) == 2


def test_a_rewrite_with_size_and_mtime_kept_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    path = tmp_path / "rows.csv"
    path.write_bytes(b"abc")
    before = path.stat()
    first = cache.content_digest(path)
    path.write_bytes(b"abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert cache.content_digest(path) == hashlib.sha256(b"abd").hexdigest() != first


def test_a_replaced_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    path, other = tmp_path / "rows.csv", tmp_path / "other.csv"
    path.write_bytes(b"abc")
    other.write_bytes(b"abd")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    cache.content_digest(path)
    cache.content_digest(other)
    os.replace(other, path)
    assert cache.content_digest(path) == hashlib.sha256(b"abd").hexdigest()


@pytest.mark.parametrize("fault", ["file", "full", "no home"])
def test_without_a_cache_a_run_goes_on_after_a_warning(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Permissions alone would not stop the superuser, as whom tests may run: a file stands in the folder's place."""
    if fault == "file":
        (tmp_path / "file").write_text("not a folder")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif fault == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    else:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(cache.tempfile, "mkstemp", full)
    path = tmp_path / "rows.csv"
    path.write_bytes(b"abc")
    for _ in range(2):
        cache.write_entry("checks", KEY, b"content")
        assert cache.read_entry("checks", KEY) is None
        assert cache.content_digest(path) == hashlib.sha256(b"abc").hexdigest()
    warnings = [record for record in caplog.records if "the cache folder cannot be used" in record.message]
    assert len(warnings) == 1


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(b"old")

    def write_half() -> None:
        with cache.new_file(path) as beside:
            beside.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir() if file.is_file()] == [("entry", b"old")]


def test_the_entries_that_were_used_last_stay(tmp_path: Path) -> None:
    """Of 5 entries of 10 bytes each, 3 fit into 30 bytes; a file that a killed process left an hour ago goes too."""
    folder = tmp_path / "entries"
    folder.mkdir()
    for number in range(5):
        path = folder / f"{number}"
        path.write_bytes(b"0123456789")
        os.utime(path, (1000 + number, 1000 + number))
    (folder / ".new-1").write_bytes(b"half")
    os.utime(folder / ".new-1", (1000, 1000))
    (folder / ".new-2").write_bytes(b"half")
    cache.prune(folder, most_bytes=30)
    assert sorted(path.name for path in folder.iterdir()) == [".new-2", "2", "3", "4"]
    cache.prune(folder, most_entries=1)
    assert sorted(path.name for path in folder.iterdir()) == [".new-2", "4"]


def test_processes_that_write_one_entry_leave_it_whole(tmp_path: Path) -> None:
    program = (
        "import sys; from cepo.data import cache\n"
        f"for number in range(40): cache.write_entry('checks', '{KEY}', sys.argv[1].encode() * 100_000)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, letter]) for letter in "ab"]
    seen: set[bytes | None] = set()
    while any(process.poll() is None for process in running):
        seen.add(cache.read_entry("checks", KEY))
    assert [process.wait() for process in running] == [0, 0]
    seen.add(cache.read_entry("checks", KEY))
    assert seen <= {None, b"a" * 100_000, b"b" * 100_000}
    assert seen - {None}

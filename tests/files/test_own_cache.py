"""What is kept for a later start is believed only as this user wrote it, and is never needed."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolation import own_caches

from cepo.errors import unusable_place
from cepo.files import own_cache
from cepo.files.own_cache import cached, has_entry, own_folder
from cepo.run_folder.own_records import is_own_record, remember_own_record

KEY = "ab" * 16


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path) -> Iterator[None]:
    own_cache._warn.cache_clear()
    with own_caches(tmp_path / "cache"):
        yield
    own_cache._warn.cache_clear()


def write(content: str = "content", key: str = KEY) -> Path:
    """Makes the entry if it is not there, and returns its file."""
    with cached("rows", key) as entry:
        file = entry / "inner" / "file"
        if not file.exists():
            file.parent.mkdir()
            file.write_text(content, encoding="utf-8")
    return file


def test_an_entry_is_made_once() -> None:
    assert not has_entry("rows", KEY)
    write("first")
    assert has_entry("rows", KEY)
    assert write("second").read_text() == "first"
    assert write("third", key="cd" * 16).read_text() == "third"


_FULL = OSError(errno.ENOSPC, "No space left on device")


def _fails(error: Exception, cause: Exception | None) -> None:
    with cached("rows", KEY) as entry:
        (entry / "half").write_text("half")
        raise error from cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        pytest.param(_FULL, None, id="of a write, which names no file"),
        pytest.param(RuntimeError("while generating"), _FULL, id="wrapped by datasets"),
        pytest.param(shutil.Error([("a", "b", str(_FULL))]), None, id="of copying a folder"),
    ],
)
def test_a_full_disk_is_named_and_not_kept_full(error: Exception, cause: Exception | None) -> None:
    """Half of an entry would be of no use."""
    entry = own_cache.cache_folder("rows") / KEY
    with pytest.raises(OSError, match=re.escape(str(entry))) as caught:
        _fails(error, cause)
    assert "XDG_CACHE_HOME" in (unusable_place(caught.value) or "")
    assert not entry.exists()
    assert write("whole").read_text() == "whole"


def test_a_flipped_bit_is_seen_wherever_it_is() -> None:
    """200 bits of all files of the entry, its seal included, one at a time; the time of a last change may be set back."""
    draw = random.Random(0)
    for _ in range(200):
        file = write("the content of an entry")
        entry = file.parents[1]
        changed = draw.choice([file, entry / "seal.json"])
        content = bytearray(changed.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        status = changed.stat()
        changed.write_bytes(content)
        if draw.random() < 0.5:
            os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert write("the content of an entry").read_text() == "the content of an entry"


def test_a_touched_file_is_read_and_believed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    os.utime(write("first"))
    assert write("second").read_text() == "first"
    assert "made anew" not in caplog.text


def test_what_a_killed_process_left_counts_for_nothing() -> None:
    def interrupted() -> None:
        with cached("rows", KEY) as entry:
            (entry / "inner").mkdir()
            (entry / "inner" / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert write("whole").read_text() == "whole"


@pytest.mark.parametrize("kind", ["link to a folder", "link to a file", "pipe"])
def test_what_stands_in_an_entrys_place_is_named_and_unharmed(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the place of the entry and of its lock."""
    users_folder = tmp_path / "other"
    users_folder.mkdir()
    (users_folder / "mine").write_text("mine")
    places = [own_cache.cache_folder("rows") / name for name in (KEY, f"{KEY}.lock")]
    for place in places:
        if kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(users_folder if kind == "link to a folder" else users_folder / "mine")
    assert write("own").read_text() == "own"
    for place in places:
        assert str(place) in caplog.text
    assert [file.name for file in users_folder.iterdir()] == ["mine"]
    assert (users_folder / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", [KEY, f"{KEY}.lock"])
def test_what_another_user_owns_is_named_and_not_emptied(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`lstat` says that the user 4711 owns the place, as only root can arrange."""
    place = own_cache.cache_folder("rows") / name
    place.mkdir()
    (place / "mine").write_text("mine")
    original = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        fields = list(original(path))
        if path == place:
            fields[4] = 4711
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", lstat)
    file = write("own")
    assert file.read_text() == "own"
    assert not file.is_relative_to(place.parent)
    assert f"{place} belongs to the user 4711" in caplog.text
    assert (place / "mine").read_text() == "mine"


def test_a_lock_that_is_another_files_second_name_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = own_cache.cache_folder("rows") / f"{KEY}.lock"
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", lock)
    assert write("own").read_text() == "own"
    assert (tmp_path / "mine").read_text() == "mine"
    assert str(lock) in caplog.text


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_within_an_entry_is_never_opened(kind: str, tmp_path: Path) -> None:
    file = write("own")
    (tmp_path / "other").write_text("other")
    for place in (file, file.parents[1] / "seal.json"):
        place.unlink()
        if kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(tmp_path / "other")
        assert write("own").read_text() == "own"
    assert (tmp_path / "other").read_text() == "other"


def others_may_write(place: Path) -> None:
    place.chmod(0o777)


def a_group_may_write(place: Path) -> None:
    place.chmod(0o770)


def others_may_write_around(place: Path) -> None:
    place.parent.chmod(0o777)


def is_a_link(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))


def is_below_a_link_into_a_folder_of_all(place: Path) -> None:
    folder_of_all = place.parents[2] / "all"
    folder_of_all.mkdir()
    place.parent.rename(folder_of_all / "cepo")
    place.parent.symlink_to(folder_of_all / "cepo")
    folder_of_all.chmod(0o777)


def is_a_file(place: Path) -> None:
    place.rmdir()
    place.write_text("no folder")


@pytest.mark.parametrize(
    "change",
    [
        others_may_write,
        a_group_may_write,
        others_may_write_around,
        is_a_link,
        is_below_a_link_into_a_folder_of_all,
        is_a_file,
    ],
)
def test_a_folder_that_others_may_change_is_replaced(
    change: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "cache" / "cepo" / "rows"
    place.mkdir(mode=0o700, parents=True)
    assert callable(change)
    change(place)
    for _ in range(2):
        assert write("own").read_text() == "own"
    assert not write("own").is_relative_to(tmp_path / "cache")
    assert caplog.text.count(f"the folder {place} is not used") == 1
    assert "XDG_CACHE_HOME names another folder" in caplog.text


def test_a_folder_of_another_user_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cache" / "cepo" / "rows"
    place.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert own_folder(place) != place


def test_a_folder_below_one_of_another_user_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other user could put another folder in its place. `lstat` says that the user 4711 owns it, as no test can arrange."""
    place = tmp_path / "theirs" / "cache"
    place.parent.mkdir()
    original = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        status = original(path)
        fields = list(status)
        if path == place.parent:
            fields[4] = 4711
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert own_folder(place) != place
    assert not place.exists()


def test_parents_may_be_sticky_and_a_groups(tmp_path: Path) -> None:
    """As /tmp is, and as folders are where a user's umask gives rights to the user's own group."""
    place = tmp_path / "sticky" / "group" / "own"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o775)
    place.parents[1].chmod(0o1777)
    assert own_folder(place) == place


def test_without_a_home_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)
    monkeypatch.chdir(tmp_path)
    assert write("own").read_text() == "own"
    assert not (tmp_path / "~").exists()


def test_a_file_system_without_locks_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert write("own").read_text() == "own"
    assert "No locks available. This run does the same work itself" in caplog.text


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_flock_has_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre can be mounted so. Releases of filelock before 3.24 raised `NotImplementedError`, which ended the run."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert write("first").read_text() == "first"
    assert write("second").read_text() == "first"


def hold(lock: Path, seconds: int) -> None:
    """Locks an entry, as a process does that makes it or was stopped meanwhile."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(f"{lock}.held").touch()
        time.sleep(seconds)


@pytest.mark.heavy
@pytest.mark.parametrize(("seconds", "is_in_cache"), [(1, True), (60, False)])
def test_another_process_is_waited_for_with_a_word_and_a_limit(
    seconds: int,
    is_in_cache: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(own_cache, "LONGEST_WAIT_SECONDS", 3.0)
    lock = own_cache.cache_folder("rows") / f"{KEY}.lock"
    fork = multiprocessing.get_context("fork")
    holder = fork.Process(target=hold, args=(lock, seconds))
    holder.start()
    try:
        while not Path(f"{lock}.held").exists():
            time.sleep(0.01)
        begin = time.monotonic()
        file = write("own")
        assert time.monotonic() - begin < 15
    finally:
        holder.kill()
        holder.join()
    assert f"waiting for another process that does the same work and has locked {lock}" in caplog.text
    assert file.is_relative_to(lock.parent) == is_in_cache
    assert (f"{lock} is not used: " in caplog.text) != is_in_cache


def test_entries_unused_for_long_go_when_another_is_made() -> None:
    unused = write(key="old")
    used = write(key="kept")
    for file in (unused, used):
        os.utime(file.parents[1], (1e9, 1e9))
    own_cache._remove_unused.cache_clear()  # it is done once in a process
    write(key="kept")  # which uses it
    write(key="new")
    assert used.exists()
    assert not unused.exists()


# Records of own runs


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "config.yaml"
    file.write_text("data: {}\n")
    return file


def test_only_the_users_own_notes_make_a_record_his(record: Path, tmp_path: Path) -> None:
    assert not is_own_record(record)
    remember_own_record(record.read_text())
    assert is_own_record(record)
    (tmp_path / "state" / "cepo" / "own_records").chmod(0o777)
    assert not is_own_record(record)


def test_a_note_is_written_through_no_link_and_read_from_none(
    record: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remember_own_record(record.read_text())
    (note,) = (tmp_path / "state" / "cepo" / "own_records").iterdir()
    for make in (lambda: note.symlink_to(record), lambda: os.mkfifo(note)):
        note.unlink()
        make()
        assert not is_own_record(record)
    note.unlink()
    note.symlink_to(tmp_path / "other")
    remember_own_record(record.read_text())
    assert "this run is not noted as yours" in caplog.text
    assert not (tmp_path / "other").exists()

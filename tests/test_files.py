"""Files are written whole; what a killed process left of the same file goes with the next one."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from restorekv import files
from restorekv.errors import RestoreKVError
from restorekv.files import (
    HOST,
    append_line,
    file_lock,
    folder_lock,
    list_files,
    load_lines,
    make_unique_name,
    open_without_links,
    replace_file,
    write_json,
)
from restorekv.train.checkpoint import start_log

KILLED = """
import os, signal, sys
from pathlib import Path
from restorekv.files import replace_file

with replace_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    target, other = tmp_path / "a[1].json", tmp_path / "b.json"
    for path in (target, other):
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2 and left[0].startswith(".a[1].json.") and left[0].endswith(".tmp")
    dead = left[0].split(".")[-2]
    number = dead.removeprefix(f"{HOST}-")
    stay = [
        f".a[1].json.{HOST}-mine.tmp",
        f".a[1].json.{HOST}-{os.getppid()}.tmp",
        f".a1.json.{dead}.tmp",
        f"a[1].json.{dead}.tmp",
        f".a[1].json.other-{number}.tmp",
    ]
    for name in stay:
        (tmp_path / name).write_text("stays")
    write_json(target, [1])
    assert {path.name for path in tmp_path.iterdir()} == {target.name, left[1], *stay}
    with replace_file(other) as temporary:
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {target.name, other.name, *stay}


def test_what_a_killed_check_left_goes_with_the_next_check(tmp_path):
    """The check of a folder's name writes a file next to it, and nothing else is written there."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    files.check_target(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_private_file_stays_private(tmp_path):
    path = tmp_path / "mine"
    path.write_text("old")
    for mode in (0o600, 0o640, 0o444):
        path.chmod(mode)
        with replace_file(path) as temporary:
            # Nobody else reads it, and its owner can write it.
            assert temporary.stat().st_mode & 0o777 == mode | 0o600
            temporary.write_text("new")
        assert path.read_text() == "new" and path.stat().st_mode & 0o777 == mode


def test_a_folder_has_one_worker_at_a_time(tmp_path):
    with folder_lock(tmp_path / "new"):
        with (
            pytest.raises(RestoreKVError, match="Another process is at work"),
            folder_lock(tmp_path / "new"),
        ):
            pass
        assert list((tmp_path / "new").iterdir())
    assert not (tmp_path / "new").exists()
    with folder_lock(tmp_path / "new"):
        pass


def test_a_lock_that_its_holder_removes_meanwhile_is_not_acquired(tmp_path, monkeypatch):
    """A third process would lock the new file of that name, and two would be at work."""
    lock = fcntl.flock

    def after_the_holder(file, how):
        (tmp_path / ".lock").unlink()  # what the holder does last
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_holder)
    with pytest.raises(RestoreKVError, match="Another process is at work"), folder_lock(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    folder.mkdir()
    victim.write_text("precious")
    (folder / ".lock").symlink_to(victim)
    with (
        pytest.raises(RestoreKVError, match="symbolic link, which is not followed"),
        folder_lock(folder),
    ):
        pass
    assert victim.read_text() == "precious" and (folder / ".lock").is_symlink()


@pytest.mark.parametrize("kind", ["fifo", "missing target"])
def test_a_lock_is_a_regular_file(tmp_path, kind):
    lock = tmp_path / ".lock"
    os.mkfifo(lock) if kind == "fifo" else lock.symlink_to(tmp_path / "made by us")
    with pytest.raises(RestoreKVError, match="remove it"), folder_lock(tmp_path):
        pass
    assert not (tmp_path / "made by us").exists()


def test_a_lock_keeps_what_its_file_holds(tmp_path):
    (tmp_path / "notes").write_text("precious")
    with file_lock(tmp_path / "notes") as acquired:
        assert acquired
    assert (tmp_path / "notes").read_text() == "precious"


def test_temporary_names_cannot_be_guessed(tmp_path):
    names = {make_unique_name(tmp_path / "o.rkv").name.split("-")[-1] for _ in range(50)}
    assert len(names) == 50 and all(len(name) == len("0123456789abcdef.tmp") for name in names)


def test_nothing_is_written_through_a_link_that_took_the_temporary_name(tmp_path, monkeypatch):
    victim, taken = tmp_path / "victim", tmp_path / ".o.tmp"
    victim.write_text("precious")
    taken.symlink_to(victim)
    monkeypatch.setattr(files, "check_target", lambda path: None)
    monkeypatch.setattr(files, "make_unique_name", lambda path: taken)
    with pytest.raises(RestoreKVError, match="File exists"):
        write_json(tmp_path / "o", [1])
    assert victim.read_text() == "precious" and not (tmp_path / "o").exists()


def test_a_sweep_leaves_links_and_what_they_lead_to(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "o")], check=False)
    (left,) = tmp_path.iterdir()
    dead = left.name.split("-")[1]
    victims = tmp_path / "victims"
    victims.mkdir()
    (victims / "file").write_text("precious")
    links = [tmp_path / f".o.{HOST}-{dead}-{number}.tmp" for number in (7, 8)]
    links[0].symlink_to(victims)
    links[1].symlink_to(victims / "file")
    write_json(tmp_path / "o", [1])
    assert not left.exists() and all(link.is_symlink() for link in links)
    assert (victims / "file").read_text() == "precious"


def test_a_users_link_stays_and_one_in_the_packages_own_folder_is_replaced(tmp_path):
    """Users may keep their outputs elsewhere; a name that we chose, in a folder from elsewhere, is
    not followed.
    """
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_json(link, ["new"])
    assert link.is_symlink() and "new" in target.read_text()
    write_json(link, ["newer"], follow=False)
    assert (
        not link.is_symlink() and "newer" in link.read_text() and "newer" not in target.read_text()
    )


def test_logs_are_not_appended_to_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("answers.jsonl", "loss.csv"):
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(RestoreKVError, match="symbolic link"):
            open_without_links(tmp_path / name)
    with pytest.raises(RestoreKVError, match="symbolic link"):
        append_line(tmp_path / "answers.jsonl", {"a": 1})
    assert victim.read_text() == "precious"


def test_a_new_run_replaces_a_link_in_the_place_of_its_log(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("")  # which is the start of a log
    run.mkdir()
    (run / "loss.csv").symlink_to(victim)
    start_log(run, 0)
    assert victim.read_text() == "" and not (run / "loss.csv").is_symlink()


def test_the_index_of_a_store_is_not_opened_through_a_link(tmp_path):
    from restorekv.serve.store import Store

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "index.sqlite").symlink_to(victim)
    with pytest.raises(RestoreKVError, match="symbolic link"):
        Store(tmp_path / "store", 1 << 20)
    assert victim.read_text() == "precious"


def test_linked_folders_are_followed_and_counted_once(tmp_path):
    given = tmp_path / "given"
    outside = tmp_path / "outside"
    (given / "sub").mkdir(parents=True)
    outside.mkdir()
    for path in (given / "a.txt", given / "sub" / "b.txt", outside / "c.txt"):
        path.write_text("text")
    links = {
        given / "linked": outside,
        given / "again": outside,
        given / "alias": given / "sub",
        given / "sub" / "up": given,
        given / "sub" / "above": tmp_path,
        outside / "back": given,
        given / "gone": tmp_path / "nowhere",
    }
    for link, target in links.items():
        link.symlink_to(target)
    names = [str(path.relative_to(given)) for path in list_files(given)]
    assert names == ["a.txt", "again/c.txt", "sub/b.txt"]
    broken: list[Path] = []
    list_files(given, broken_links=broken)
    assert broken == [given / "gone"]


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    """Its files would be missing without a word, of evaluation texts too."""
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(place):
        if Path(place).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RestoreKVError, match=r"closed cannot be read \(Permission denied\)"):
        list_files(tmp_path)


def test_a_folder_that_is_hidden_counts_where_it_is_linked(tmp_path):
    (tmp_path / ".store").mkdir()
    for name in (".store/a.txt", ".b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "shown").symlink_to(tmp_path / ".store")
    assert list_files(tmp_path, hidden=False) == [tmp_path / "shown" / "a.txt"]
    assert list_files(tmp_path) == [tmp_path / ".b.txt", tmp_path / ".store" / "a.txt"]


def test_lines_are_read_back_but_for_one_that_was_being_written(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert list(load_lines(path)) == []
    append_line(path, {"a": "ü"})
    append_line(path, {"b": [1]})
    with path.open("ab") as file:
        file.write(b'{"c": ')
    assert list(load_lines(path)) == [{"a": "ü"}, {"b": [1]}]
    append_line(path, {})
    assert list(load_lines(path)) == [{"a": "ü"}, {"b": [1]}, {}]
    for damaged in (b"7\n", b"{\n"):
        path.write_bytes(damaged)
        with pytest.raises(RestoreKVError, match=r"lines\.jsonl is damaged \(.*\); fetch or make"):
            list(load_lines(path))


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_folder_that_was_locked_in_vain_is_gone(tmp_path, existed, written):
    folder = tmp_path / "new"
    if existed:
        folder.mkdir()
    with pytest.raises(ValueError, match="no"), folder_lock(folder):
        if written:
            (folder / "file").touch()
        raise ValueError("no")
    assert folder.exists() == (existed or written)
    assert not (folder / ".lock").exists()

"""Caches that several servers share: a folder at any address that fsspec knows, by document.

A file appears there whole or not at all. What is deleted leaves a note, so that the other servers
drop their copies. Where the folder cannot be reached, its methods say so in the log and return
None, and are quiet for a while.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path

from restorekv.errors import RestoreKVError, summarize_error
from restorekv.files import HOST, NUMBERS, replace_file

LOG = logging.getLogger("restorekv.serve")
# A file is seen once all of it has come.
WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
PAUSE = 30.0  # seconds without another try after a failure
NOTES = 30 * 86400  # seconds for which a note of a deletion stays
HALF = 86400  # seconds after which a temporary file was left by a server that is dead


def going_on(method: Callable) -> Callable:
    """Logs errors of a method, which are of as many kinds as there are filesystems, and pauses the
    folder.
    """

    @wraps(method)
    def tried(self: SharedFolder, *arguments: object) -> object:
        if time.monotonic() < self.resumes:
            return None
        try:
            return method(self, *arguments)
        except Exception as error:
            self.resumes = time.monotonic() + PAUSE
            LOG.warning(json.dumps({"shared": self.url, "problem": summarize_error(error)}))
            return None

    return tried


class SharedFolder:
    """The folder at `url`; raises RestoreKVError where it cannot be used from the start."""

    def __init__(self, url: str) -> None:
        # without a password
        self.url = re.sub("//[^/@]*@", "//", url)
        self.resumes = 0.0
        try:
            self.files, root = import_module("fsspec").core.url_to_fs(url, use_listings_cache=False)
            self.root = root.rstrip("/")
            kinds = (
                {self.files.protocol}
                if isinstance(self.files.protocol, str)
                else set(self.files.protocol)
            )
            self.whole = bool(kinds & WHOLE)
            for name in ("tmp", "deleted"):
                self.prepare(f"{self.root}/{name}/x")
            self.files.pipe_file(trial := self.temporary("trial"), b"")
            self.files.rm_file(trial)
            self.tidy()
        except ImportError as error:
            raise RestoreKVError(
                f"The shared folder {self.url} needs a package ({summarize_error(error)}); install it."
            ) from None
        except Exception as error:  # each filesystem has its own
            reason = summarize_error(error) or type(error).__name__
            fix = "check its address, your rights and the network"
            raise RestoreKVError(
                f"Cannot use the shared folder {self.url} ({reason}); {fix}."
            ) from None

    def place(self, sha256: str, key: str) -> str:
        return f"{self.root}/{sha256}/{key}.rkv"

    def temporary(self, name: str) -> str:
        return f"{self.root}/tmp/{time.time_ns()}-{HOST}-{os.getpid()}-{next(NUMBERS)}-{secrets.token_hex(8)}-{name}"

    def prepare(self, path: str) -> None:
        """Makes the folder of a file, where there are folders."""
        if not self.whole:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def tidy(self) -> None:
        """Removes what dead servers left half-written, and old notes."""
        for kind, age in {"tmp": HALF, "deleted": NOTES}.items():
            for path, stamp, _ in self.stamped(kind):
                if stamp < time.time_ns() - age * 10**9:
                    self.files.rm_file(path)

    def stamped(self, kind: str) -> list[tuple[str, int, str]]:
        """Returns paths in a folder whose files are named TIME-REST, with both parts; the time is
        in nanoseconds.
        """
        try:
            paths = [str(each) for each in self.files.ls(f"{self.root}/{kind}", detail=False)]
        except FileNotFoundError:  # no file, hence no folder
            return []
        parts = [(path, *path.rpartition("/")[2].partition("-")[::2]) for path in paths]
        return [(path, int(stamp), rest) for path, stamp, rest in parts if stamp.isdecimal()]

    @going_on
    def put(self, path: Path, sha256: str, key: str) -> bool:
        """Copies a cache there; returns whether it is there now."""
        place = self.place(sha256, key)
        self.prepare(place)
        if self.whole:
            self.files.put_file(str(path), place)
            return True
        temporary = self.temporary(key)
        try:
            self.files.put_file(str(path), temporary)
            self.files.mv(temporary, place)
        except BaseException:
            if self.files.exists(temporary):
                self.files.rm_file(temporary)
            raise
        return True

    @going_on
    def get(self, sha256: str, key: str, path: Path, most: int) -> bool:
        """Copies a cache of at most so many bytes from there, unchecked; returns whether there was
        one.
        """
        place = self.place(sha256, key)
        try:
            about = self.files.info(place)
            if about["type"] != "file" or about.get("islink") or about["size"] > most:
                return False
            with replace_file(path, follow=False) as temporary:
                self.files.get_file(place, str(temporary))
        except FileNotFoundError:
            return False
        return True

    @going_on
    def remove(self, sha256: str) -> bool:
        """Deletes all caches of a document and leaves a note; returns whether that is done."""
        with suppress(FileNotFoundError):
            self.files.rm(f"{self.root}/{sha256}", recursive=True)
        self.files.pipe_file(f"{self.root}/deleted/{time.time_ns()}-{sha256}", b"")
        return True

    @going_on
    def removed(self) -> dict[str, int]:
        """Returns the documents that were deleted lately, with the nanosecond."""
        return {sha256: stamp for _, stamp, sha256 in sorted(self.stamped("deleted"))}

    @going_on
    def set_aside(self, sha256: str, key: str) -> None:
        """Moves a damaged cache away."""
        target = f"{self.root}/damaged/{key}.rkv"
        self.prepare(target)
        self.files.mv(self.place(sha256, key), target)

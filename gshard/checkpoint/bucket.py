"""`Bucket`: the objects below an address such as `gs://bucket/run`, by fsspec; `Upload` of one.

fsspec's `gcsfs` and `s3fs` find endpoints and credentials where the stores' own tools do, retry
what may succeed later, and write an object only if there is none. TensorStore, which Orbax uses,
has neither the endpoints of S3's tools nor such writes for all servers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.version import install_command
from gshard.checkpoint.step_files import StoreError, run_parallel

SCHEMES = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # of addresses; the extra that has the package
REQUESTS = 16  # at once
_PART = 2**24  # bytes of a request of an upload, if 10,000 suffice: S3 takes no more
_PARTS = 4  # of a file that s3fs reads and sends at once; ten of 50 MiB by itself
_UNIT = 2**18  # of which a request to Google's store has a multiple
_EMULATOR = "STORAGE_EMULATOR_HOST"  # as Google's own libraries read it
_SILENCE = 60.0  # seconds without an answer, or in which nothing sent is read: then asked again
_LONGEST = 1800.0  # seconds of a request to Google's store, also if nobody reads what it sends
_explaining: list[str] = []  # an item for each call whose errors gshard reports itself


class Bucket:
    """The objects below an address; each is named by its path from there."""

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        self._scheme, _, self._root = self.address.partition("://")
        self._fs_of: dict[int, Any] = {}  # by process: a forked child needs its own
        self._has_bucket = False
        _ = self._fs  # tells at once if a package is missing

    @property
    def _fs(self) -> Any:
        if (found := self._fs_of.get(os.getpid())) is None:
            found = self._fs_of[os.getpid()] = _file_system(self._scheme)
        return found

    def __str__(self) -> str:
        return self.address

    def list(self, folder: str = "") -> dict[str, bool]:
        """The names directly in a folder, and whether each is a folder; empty if there is none."""
        path = self._path(folder)
        with self._explained("list", folder):
            try:
                found = self._fs.ls(path, detail=True)
            except FileNotFoundError:
                self._check_bucket()
                return {}
        names = {x["name"].rstrip("/").rpartition("/")[2]: x["type"] != "file" for x in found}
        return {name: is_folder for name, is_folder in names.items() if name}

    def find(self, folder: str) -> dict[str, int]:
        """The bytes of every object in a folder and those below it, by name from that folder."""
        start = self._path(folder) + "/"
        with self._explained("list", folder):
            found = self._fs.find(start, detail=True)
        return {path.removeprefix(start): about["size"] for path, about in found.items()}

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """The bytes of an object; None if there is none."""
        about = self._about(name)
        return None if about is None else about["size"]

    def version(self, name: str) -> object:
        """A value that changes when the object is replaced; None if there is no object."""
        about = self._about(name)
        return None if about is None else (about["size"], about.get("ETag") or about.get("etag"))

    def _about(self, name: str) -> dict[str, Any] | None:
        try:
            with self._explained("read", name):
                about = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return about if about["type"] == "file" else None

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of an object, or some of them; fewer where it ends."""
        if end is not None and end <= start:
            return b""
        with self._explained("read", name):
            return self._fs.cat_file(self._path(name), start=start or None, end=end)

    def create(self, name: str, content: bytes | Path) -> None:
        """Writes an object, from bytes or a file.

        Raises:
          FileExistsError: there is another one of that name.
        """
        path = self._path(name)
        if isinstance(content, Path):
            content.stat()  # later, that it is missing would read as a missing bucket
        with self._explained("write", name):
            try:
                if isinstance(content, Path):
                    self._fs.put_file(str(content), path, mode="create", **self._sent(content))
                else:
                    self._fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                # A request that was repeated finds what it has written itself.
                own = content.read_bytes() if isinstance(content, Path) else content
                if self._fs.cat_file(path) != own:
                    raise FileExistsError(f"{self}/{name} exists already") from None

    def _sent(self, file: Path) -> dict[str, int]:
        """How a file is sent: gcsfs holds one part of it at a time."""
        if SCHEMES[self._scheme] != "s3":
            return {}
        return {"chunksize": _part_of(file.stat().st_size), "max_concurrency": _PARTS}

    def replace(self, name: str, content: bytes) -> None:
        """Writes an object, also in the place of another one."""
        with self._explained("write", name):
            self._fs.pipe_file(self._path(name), content)

    def copy(self, name: str, new: str) -> None:
        """Copies an object within the store."""
        with self._explained("copy", name):
            self._fs.cp_file(self._path(name), self._path(new))

    def delete(self, names: Collection[str]) -> None:
        """Deletes objects, in any order; those that are gone do not matter."""

        def delete(name: str) -> None:
            with contextlib.suppress(FileNotFoundError), self._explained("delete", name):
                self._fs.rm_file(self._path(name))

        run_parallel(delete, names, REQUESTS)

    def _check_bucket(self) -> None:
        """Raises a `StoreError` if there is no such bucket; not if it may not be listed."""
        if self._has_bucket:
            return
        try:
            self._fs.ls(self._root.partition("/")[0])
        except FileNotFoundError as error:
            raise self._no_bucket() from error
        except Exception:  # a user may have rights to a part of it alone
            pass
        self._has_bucket = True

    def _no_bucket(self) -> StoreError:
        return StoreError(f"{self}: there is no such bucket. Make it first.")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        """Errors but those of missing and existing objects become one sentence."""
        where = f"{self}/{name}".rstrip("/")
        _explaining.append(where)
        try:
            yield
        except FileNotFoundError as error:
            if verb == "write":
                raise self._no_bucket() from error
            raise
        except (FileExistsError, StoreError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:300].lstrip(", ").rstrip(".")
            if not text:
                late = isinstance(error, TimeoutError)
                text = "the server does not answer" if late else type(error).__name__
            raise StoreError(
                f"cannot {verb} {where}: {text}. {_hint(error, self._path(name))}"
            ) from error
        finally:
            _explaining.pop()


class Upload:
    """An object of a known size that is being written; with `commit` it gets its name.

    Leaving the context without `commit` aborts it: nothing of it stays in the store.
    """

    def __init__(self, bucket: Bucket, name: str, size: int):
        self._bucket, self._name, self._size = bucket, name, size
        self._part = _part_of(size)
        self._written, self._committed = 0, False

    def __enter__(self) -> Upload:
        with self._bucket._explained("write", self._name):
            self._file = self._bucket._fs.open(
                self._bucket._path(self._name), "wb", block_size=self._part, autocommit=False
            )
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes; the last ones are sent at once, so that nothing is held for `commit`."""
        view = memoryview(data)
        with self._bucket._explained("write", self._name):
            while view:
                part = view[: self._part - self._written % self._part]
                self._file.write(part)
                self._written += len(part)
                view = view[len(part) :]
            if self._written == self._size:
                self._file.close()

    def commit(self) -> None:
        """Gives the object its name."""
        with self._bucket._explained("write", self._name):
            self._file.commit()
        self._committed = True

    def __exit__(self, *_: object) -> None:
        if not self._committed:
            # The store may be out of reach.
            with contextlib.suppress(Exception), self._bucket._explained("discard", self._name):
                self._file.discard()
            self._file.closed = True  # else it would be completed when it is collected


def _part_of(size: int) -> int:
    """The bytes of each request in an upload of `size` bytes."""
    return max(_PART, _UNIT * (size // 9_999 // _UNIT + 1))


def _file_system(scheme: str) -> Any:
    """The file system of fsspec, which connects when it is used."""
    import fsspec
    from fsspec.config import conf

    extra = SCHEMES[scheme]
    given: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if extra == "gcs" and os.environ.get(_EMULATOR):
        given["token"] = "anon"
        # Else gcsfs asks Google itself of what kind a bucket is.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        if extra == "gcs":
            from aiohttp import ClientTimeout  # pyright: ignore[reportMissingImports]

            # Without it gcsfs waits forever; s3fs does not.
            given["requests_timeout"] = ClientTimeout(
                total=_LONGEST, sock_connect=_SILENCE, sock_read=_SILENCE
            )
            logging.getLogger("gcsfs").addFilter(_is_wanted)  # again changes nothing
        else:
            users = conf.get(scheme, {}).get("config_kwargs") or {}
            own = _limits_of_uploads()
            connector = own["connector_args"] | (users.get("connector_args") or {})
            given["config_kwargs"] = own | users | {"connector_args": connector}
        return fsspec.filesystem(scheme, **given)
    except ImportError as error:
        raise GShardError(
            f"{scheme}:// needs a package that is not installed: {install_command(extra)}"
        ) from error


def _limits_of_uploads() -> dict[str, Any]:
    """Settings of s3fs, which limits how long it waits for an answer once all has been sent."""
    from aiobotocore.httpsession import AIOHTTPSession  # pyright: ignore[reportMissingImports]

    class Session(AIOHTTPSession):
        """Sends uploads at once: the server's answer to `Expect` is waited for without limit."""

        async def send(self, request: Any) -> Any:
            request.headers.pop("Expect", None)
            return await super().send(request)

    def connecting(address: tuple[Any, ...]) -> socket.socket:
        made = socket.socket(*address[:3])
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _SILENCE))
        return made

    return {"http_session_cls": Session, "connector_args": {"socket_factory": connecting}}


def _is_wanted(record: logging.LogRecord) -> bool:
    """False for the traceback that gcsfs logs of an error before gshard reports it."""
    debugs = logging.getLogger("gcsfs").isEnabledFor(logging.DEBUG)
    return debugs or not (_explaining and record.exc_info)


def _hint(error: Exception, address: str) -> str:
    """What to do about an error of a store's library."""
    text = f"{type(error).__name__} {error}".lower().replace(address.lower(), "")
    refused = r"\b(401|403)\b|forbidden|denied|permission|credential|signature|access key"
    if re.search(refused, text):
        return (
            "Check the credentials: gshard uses those that the store's own command line finds "
            "(`aws s3 ls`, `gcloud storage ls`)."
        )
    return "Check the network, and the endpoint if one is set."

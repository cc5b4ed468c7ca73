"""Open files and sockets: how many this process may have, and those that no fork keeps."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

closed_in_forks: set[int] = set()
"""Descriptors that are closed in a forked child, such as a data worker. It may outlive this
process, and would keep its locks and connections. Remove a descriptor before closing it."""


def _close_in_fork() -> None:
    for descriptor in closed_in_forks:
        os.close(descriptor)
    closed_in_forks.clear()


os.register_at_fork(after_in_child=_close_in_fork)


def allow_open_files(count: int) -> int:
    """Raises the soft limit of open files to `count`, as far as the hard one lets it.

    Returns the limit, which is less where that is not enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    no_limit = resource.RLIM_INFINITY
    if soft == no_limit or soft >= count:
        return count
    most = count if hard == no_limit else min(hard, count)
    with suppress(ValueError, OSError):  # a system may have another limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

"""The number of files and sockets that this process may open."""

from __future__ import annotations

import resource
from contextlib import suppress


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

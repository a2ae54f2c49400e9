"""Whether the process of a peer still runs, as the kernel knows it."""

from __future__ import annotations

import os
import select

from kv_transfer.peering.passport import ProcessIdentity, start_time_of


class ProcessExited(Exception):
    """It has, already."""


def watch(process: ProcessIdentity) -> int | None:
    """A pidfd that becomes readable when the process has exited, all its threads included.

    None if this process cannot be watched: the system does not let us, or does not let us see
    whether the pid is still its own. Raises ProcessExited.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError as error:
        raise ProcessExited from error
    except OSError:  # no such call here
        return None
    # Only now, since from now on the pid cannot come to mean another without the pidfd telling.
    start_time = start_time_of(process.pid)
    if start_time == process.start_time:
        return pidfd
    exited = start_time is not None or _is_readable(pidfd)
    os.close(pidfd)
    if exited:
        raise ProcessExited
    return None


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])

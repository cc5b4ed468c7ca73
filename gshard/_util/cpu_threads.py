"""How many threads JAX starts for virtual CPU devices.

JAX before 0.12 starts a call before the one before it has ended, and each device of a call holds a
thread while its collectives wait. By default there are as many threads as devices, or as cores:
calls can take all of them, none can end, and XLA aborts with a "Termination timeout" of a
rendezvous. `in_flight` limits the calls of gshard's own steps.
"""

from __future__ import annotations

import os

_VARIABLE = "PJRT_NPROC"


def thread_variables(devices: int) -> dict[str, str]:
    """Returns the environment variables with which JAX starts threads for that many CPU devices.

    Two for each device are enough for functions that users compile themselves, whose calls cannot
    be limited. More threads make matrix products slower; where the environment asks for more, they
    stay.
    """
    if devices == 1:
        return {}
    asked = os.environ.get(_VARIABLE, "")
    least = max(os.cpu_count() or 1, 2 * devices)
    return {_VARIABLE: str(max(least, int(asked) if asked.isdecimal() else 0))}

"""Tells the watchdogs where process 0 serves, in a job whose processes JAX itself has joined."""

from __future__ import annotations

import json
import socket

import jax
from jax.sharding import Mesh

from gshard._util.errors import GShardError, warn
from gshard.distributed.agree import all_gather_text, check_same_call
from gshard.distributed.initialize import initialize, watchdogs
from gshard.distributed.places import Server
from gshard.distributed.rendezvous import LOOPBACK, Address, listen

_CALL, _WHAT = "state", "shard_train_state"  # the call of gshard that this is part of


def introduce(mesh: Mesh) -> None:
    """Starts the watchdog where there is none, and tells it where process 0 serves.

    Every process of the mesh calls it. `gshard.distributed.initialize` has done both where it knew
    the address of process 0. It does nothing for a mesh that leaves out a process.
    """
    ranks = {device.process_index for device in mesh.devices.flat}
    if len(ranks) < jax.process_count() or not jax.distributed.is_initialized():
        return
    initialize()  # the user may have called that of JAX alone
    (watchdog,) = watchdogs
    if watchdog.knows_others:
        return
    texts = all_gather_text(f"{_CALL}\n{socket.gethostname()}", mesh, what=_WHAT)
    hosts = check_same_call(texts, _CALL)
    server, told = None, ""
    if jax.process_index() == 0:
        try:
            at = Address(_own_address(hosts), 0)
            server = Server.listening(len(hosts), listen(at))
            told = json.dumps([at.host, *server.invitation])
        except (OSError, GShardError) as error:
            warn(
                f"Process 0 has no address for the others ({error}). Reports of long waits will "
                "not say where the other processes are. Call gshard.distributed.initialize with "
                "coordinator_address, num_processes and process_id instead."
            )
    told = all_gather_text(told, mesh, what=_WHAT)[0]
    if told:
        host, port, token = json.loads(told)
        watchdog.introduce(jax.process_index(), Address(host, port), token, server)


def _own_address(hosts: dict[int, str]) -> str:
    """The address of this machine that the others reach; loopback if all run on this one."""
    others = sorted({*hosts.values()} - {socket.gethostname()})
    if not others:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect((others[0], 9))  # sends nothing: it only finds the route
        return found.getsockname()[0]

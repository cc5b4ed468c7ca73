"""Arrays: padding, widths, and copies on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gshard._util.arrays import replicated_value


def test_a_replicated_value_is_there_when_all_devices_have_it():
    """A process that exits while a device is in a collective waits for those that have gone."""

    @jax.jit
    def late(x):
        return x + 0 * jax.lax.fori_loop(0, 40, lambda _, m: m @ m, jnp.eye(600))[0, :5]

    devices = jax.devices()[:3]
    copies = [jax.device_put(jnp.arange(5.0), device) for device in devices]
    copies[2] = late(copies[2])
    mesh = Mesh(np.array(devices), ("data",))
    x = jax.make_array_from_single_device_arrays((5,), NamedSharding(mesh, jax.P()), copies)
    assert not copies[2].is_ready()
    np.testing.assert_array_equal(replicated_value(x), np.arange(5.0))
    assert copies[2].is_ready()

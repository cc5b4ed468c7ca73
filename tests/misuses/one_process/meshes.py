"""Meshes and groups of devices."""

from __future__ import annotations

import os
import threading
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import gshard
from tests.misuses.small import shard
from tests.misuses.table import refused, right, warned


def explicit_mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def in_a_thread(_):
    made = []
    thread = threading.Thread(target=lambda: made.append(gshard.make_mesh()))
    thread.start()
    thread.join()
    return made[0].size, 8


@mock.patch.dict(os.environ, XLA_FLAGS="")
def virtual_devices_too_late(_):
    gshard.virtual_devices(16)


ROWS = {
    "the number of devices as the shape": refused(
        lambda _: gshard.make_mesh(8), "shape=8", "gshard.make_mesh({'shard': 8})"
    ),
    "a tuple as the shape": refused(lambda _: gshard.make_mesh((2, 4)), "shape=(2, 4)", "by name"),
    "pairs as the shape": refused(lambda _: gshard.make_mesh([("shard", 8)]), "shape=", "by name"),
    "devices as the shape": refused(lambda _: gshard.make_mesh(jax.devices()), "shape=", "by name"),
    "a shape without axes": refused(lambda _: gshard.make_mesh({}), "shape={}", "by name"),
    "an axis without a name": refused(lambda _: gshard.make_mesh({1: 8}), "by name"),
    "an axis of size 0": refused(lambda _: gshard.make_mesh({"a": 0}), "shape['a']=0", "1 or more"),
    "an axis of size -1, as of reshape": refused(
        lambda _: gshard.make_mesh({"a": -1}), "shape['a']=-1", "1 or more"
    ),
    "an axis of size 4.0": refused(
        lambda _: gshard.make_mesh({"a": 4.0}), "shape['a']=4.0", "1 or more"
    ),
    "more devices than there are": refused(
        lambda _: gshard.make_mesh({"a": 16}), "16", "8", "virtual_devices(16)"
    ),
    "fewer devices than there are": warned(
        lambda _: gshard.make_mesh({"a": 3}), "3 of 8", "5", "devices=jax.devices()[:3]"
    ),
    "replicas that do not divide the devices": refused(
        lambda _: gshard.make_mesh(replica=3), "replica=3", "8"
    ),
    "no replica": refused(lambda _: gshard.make_mesh(replica=0), "replica=0", "1 or more"),
    "replica=True": refused(lambda _: gshard.make_mesh(replica=True), "replica=True", "1 or more"),
    "replica as an axis by name": refused(
        lambda _: gshard.make_mesh({"replica": 2, "a": 4}), "replica=2"
    ),
    "more devices given than the shape has": refused(
        lambda _: gshard.make_mesh({"a": 2}, devices=jax.devices()[:3]),
        *("devices=", "3", "2", "jax.devices()[:2]"),
    ),
    "make_mesh(data=4)": refused(
        lambda _: gshard.make_mesh(data=4), "no argument data=", "all devices that the other axes"
    ),
    "make_mesh(tensor=2)": refused(
        lambda _: gshard.make_mesh(tensor=2), "no argument tensor=", "extra={'tensor': 2}"
    ),
    "make_mesh(context=2)": refused(
        lambda _: gshard.make_mesh(context=2), "no argument context=", "It is sequence= here"
    ),
    "make_mesh(experts=2)": refused(
        lambda _: gshard.make_mesh(experts=2), "no argument experts=", "It is expert= here"
    ),
    "shapes and names, as of jax.make_mesh": refused(
        lambda _: gshard.make_mesh((2, 4), ("a", "b")), "gshard.make_mesh({'a': 2, 'b': 4})"
    ),
    "level= for the mesh": refused(
        lambda _: gshard.make_mesh(level="os"), "an argument of shard_train_state"
    ),
    "no devices given": refused(
        lambda _: gshard.make_mesh(devices=[]), "devices=[]", "at least one"
    ),
    "indices of devices instead of devices": refused(
        lambda _: gshard.make_mesh(devices=[0, 1]), "devices=[0, 1]", "new_group([0, 1])"
    ),
    "a device given twice": refused(
        lambda _: gshard.make_mesh(devices=jax.devices()[:1] * 2), "a device twice"
    ),
    "a single device, not in a list": refused(
        lambda _: gshard.make_mesh(devices=jax.devices()[0]), "devices=", "jax.devices()"
    ),
    "a NumPy array of devices": right(
        lambda _: (gshard.make_mesh(devices=np.array(jax.devices()[:4])).size, 4)
    ),
    "the name of a backend as devices": refused(
        lambda _: gshard.make_mesh(devices="cpu"), "devices='cpu'"
    ),
    "extra= with the size of an axis that is there": refused(
        lambda _: gshard.make_mesh(extra={"shard": 2}), "'shard'"
    ),
    "a group of one number": refused(
        lambda _: gshard.distributed.new_group(3), "new_group(3)", "a list"
    ),
    "a group with a device that is not there": refused(
        lambda _: gshard.distributed.new_group([0, 8]), "8 is not a device", "0 to 7"
    ),
    "a group with a device twice": refused(
        lambda _: gshard.distributed.new_group([0, 0]), "each device once"
    ),
    "a group with a negative index": refused(
        lambda _: gshard.distributed.new_group([-1]), "-1 is not a device"
    ),
    "an empty group": refused(lambda _: gshard.distributed.new_group([]), "new_group([])"),
    "the number of virtual devices as text": refused(
        lambda _: gshard.virtual_devices("8"), "count='8'", "1 or more"
    ),
    "more virtual devices after JAX has started": refused(
        virtual_devices_too_late,
        *("virtual_devices(16)", "8", "xla_force_host_platform_device_count=16"),
    ),
    "more virtual devices than XLA_FLAGS asks for": refused(
        lambda _: gshard.virtual_devices(16),
        *("virtual_devices(16)", "8", "Set XLA_FLAGS=--xla_force_host_platform_device_count=16"),
    ),
    "as many virtual devices as there are": right(
        lambda _: (gshard.virtual_devices(8) or len(jax.devices()), 8)
    ),
    "the mesh is made in a thread": right(in_a_thread),
    "a mesh with explicit axes": refused(
        lambda _: shard(mesh=explicit_mesh()),
        *("Explicit", "'data'", "gshard.make_mesh", "axis_types="),
    ),
    "no mesh but its backend": refused(
        lambda _: shard(mesh="cpu"), "mesh='cpu'", "gshard.make_mesh()"
    ),
    "the function that makes meshes as the mesh": refused(
        lambda _: shard(mesh=gshard.make_mesh), "mesh=", "gshard.make_mesh()"
    ),
    "a list of devices as the mesh": refused(
        lambda _: shard(mesh=jax.devices()), "mesh=", "gshard.make_mesh()"
    ),
    "a sharding as the mesh": refused(
        lambda _: shard(mesh=jax.NamedSharding(gshard.make_mesh(), jax.P())),
        *("mesh=", "gshard.make_mesh()"),
    ),
}

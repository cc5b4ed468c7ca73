"""`gshard.paddle`, `gshard.pytorch` and `gshard.distributed`."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gshard
from tests.misuses.small import ADAM, BATCH, alone, loss_fn, model_loss, pair, params
from tests.misuses.table import raw, refused, right, warned

ZeRO = gshard.pytorch.ZeroRedundancyOptimizer


def wrapped(level: Any = "os", tx: Any = ADAM, **options: Any) -> Any:
    return gshard.paddle.group_sharded_parallel(pair()[0], tx, level, **options)


def plain() -> Any:
    return pair()[0]


class Scaling(nnx.Linear):
    def scale_loss(self, loss: Any) -> Any:
        return 0.1 * loss


def wrap_twice(_):
    model, optimizer, _ = wrapped()
    gshard.paddle.group_sharded_parallel(model, optimizer, "os")


def of_another_model(_):
    other = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    tx = nnx.Optimizer(other, ADAM, wrt=nnx.Param)
    model, optimizer, _ = gshard.paddle.group_sharded_parallel(plain(), tx, "os")
    model.backward(model_loss, BATCH)
    optimizer.step()


class Sowing(nnx.Linear):
    def __call__(self, x: Any) -> Any:
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "hidden", y)
        return y


def sown(_):
    model = gshard.paddle.DataParallel(Sowing(16, 8, rngs=nnx.Rngs(0)))
    with warnings.catch_warnings():  # newer Flax deprecates `sow` outside of nnx.capture
        warnings.simplefilter("ignore", DeprecationWarning)
        model(BATCH["x"])


def captured(_):
    """What it sows, in an evaluation."""
    model = gshard.paddle.DataParallel(Sowing(16, 8, rngs=nnx.Rngs(0)))
    read = lambda m, b: nnx.capture(m, nnx.Intermediate)(b["x"])[1]  # noqa: E731
    found = gshard.make_eval_step(read, model.plan)(model, BATCH)
    return found, pair()[0](BATCH["x"])


def other_tx(_):
    model, optimizer, _ = wrapped()
    optimizer.tx = optax.adam(1e-4)
    model.backward(model_loss, BATCH)
    optimizer.step()


def optimizer_of(wrapped_one: bool) -> Any:
    """An optimizer of the model that is wrapped, or of the wrapped one."""
    net, tx = plain(), optax.sgd(0.1)
    model = gshard.paddle.DataParallel(net)
    trained = model if wrapped_one else net
    optimizer = nnx.Optimizer(trained, tx, wrt=nnx.Param)
    for _ in range(3):
        loss = model.backward(model_loss, BATCH)
        optimizer.update(trained, model.grads)
        model.clear_gradients()
    return loss < model_loss(plain(), BATCH), wrapped_one


def step_first(_):
    wrapped()[1].step()


def gradients(model: Any) -> Any:
    return nnx.grad(model_loss)(model, BATCH)


def stepped(model: Any, *grads: Any) -> Any:
    """A step of SGD with the sum of gradients."""
    new = nnx.clone(model)
    total = jax.tree.map(lambda *x: sum(x), *grads)
    nnx.update(new, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(new), total))
    return new


def twice(_):
    """The gradients are there until they are cleared, as in Paddle."""
    model, optimizer, _ = wrapped(tx=optax.sgd(0.1))
    model.backward(model_loss, BATCH)
    optimizer.step()
    optimizer.step()
    grads = gradients(plain())
    return model.state_dict(), gshard.paddle.state_dict(stepped(stepped(plain(), grads), grads))


def not_cleared(_):
    """`clear_grad` is forgotten: gradients of the next batch are added, as in Paddle."""
    model, optimizer, _ = wrapped(tx=optax.sgd(0.1))
    for _ in range(2):
        model.backward(model_loss, BATCH)
        optimizer.step()
    grads = gradients(plain())
    after = stepped(plain(), grads)
    return model.state_dict(), gshard.paddle.state_dict(stepped(after, grads, gradients(after)))


def eager_backward(_):
    """`loss.backward()` of PyTorch."""
    model, _, _ = wrapped()
    model_loss(model, BATCH).backward()


def zero(params_: Any = None, *args: Any, **options: Any) -> Any:
    own = params() if params_ is None else params_
    return ZeRO(own, *(args or (optax.adam,)), **({"lr": 0.1} | options))


def one_step(_):
    own = zero()
    grads = jax.grad(loss_fn)(params(), BATCH)
    return own.step(grads), alone(tx=optax.adam(0.1))


def local_state(change: Any) -> Any:
    own = zero()
    own.load_state_dict(change(own.state_dict()))


def prefixed(_):
    model = gshard.pytorch.DistributedDataParallel(plain())
    model.load_state_dict({f"module.{name}": x for name, x in model.state_dict().items()})


def of_pytorch(_):
    model = gshard.pytorch.DistributedDataParallel(plain())
    model.load_state_dict({"weight": np.ones((8, 16)), "bias": np.ones(8)})


def of_an_optimizer(_):
    model = gshard.pytorch.DistributedDataParallel(plain())
    model.load_state_dict(zero().state_dict())


def no_gradient_of(name: str) -> None:
    model = gshard.pytorch.DistributedDataParallel(nnx.Sequential(plain()))
    optimizer = ZeRO(model.parameters(), optax.adamw, lr=0.1)
    model.backward(model_loss, BATCH)
    model.grads[name] = None
    optimizer.step()


def edited_state(_):
    """`lr` of a saved state is changed before it is loaded, as PyTorch's users do."""
    own = zero()
    saved = own.state_dict()
    saved["param_groups"][0]["lr"] = 0.01
    own.load_state_dict(saved)
    grads = jax.grad(loss_fn)(params(), BATCH)
    return own.step(grads), alone(tx=optax.adam(0.01))


def clip_too_late(_):
    model = gshard.paddle.DataParallel(plain())
    optimizer = ZeRO(model.parameters(), optax.sgd, lr=0.1, overlap_with_ddp=True)
    model.backward(model_loss, BATCH)
    model.grads = jax.tree.map(lambda g: g / 2, model.grads)
    optimizer.step()


def set_moment(_):
    zero().state["w"]["exp_avg"] = np.zeros((16, 8))


def set_entry(_):
    zero().state["w"]["exp_avg"][0] = 1.0


def grads_of_the_last(_):
    """What is None is not added to, as `p.grad = None` in PyTorch."""
    model, other = gshard.paddle.DataParallel(plain()), {k: v + 1 for k, v in BATCH.items()}
    model.backward(model_loss, other)
    model.grads["bias"] = None
    model.backward(model_loss, BATCH)
    first, second = nnx.grad(model_loss)(plain(), other), gradients(plain())
    wanted = first["kernel"] + second["kernel"], second["bias"]
    return [model.grads["kernel"], model.grads["bias"]], list(wanted)


def full_parameters(_):
    small = lambda seed: nnx.Linear(16, 3, rngs=nnx.Rngs(seed))  # noqa: E731
    model, _, _ = gshard.paddle.group_sharded_parallel(small(0), ADAM, "p_g_os", segment_size=0)
    nnx.update(model, nnx.state(small(1)))
    model.backward(lambda model, batch: model(batch["x"]).mean(), BATCH)


def no_grads(_):
    model, optimizer, _ = wrapped()
    model.backward(model_loss, BATCH)
    model.grads = None
    optimizer.step()


def first_of_two_optimizers(_):
    model = gshard.pytorch.DistributedDataParallel(plain())
    first, _ = (ZeRO(model.parameters(), optax.sgd, lr=0.1) for _ in range(2))
    model.backward(model_loss, BATCH)
    first.step()


def step_within_no_sync(_):
    model = gshard.pytorch.DistributedDataParallel(plain())
    optimizer = ZeRO(model.parameters(), optax.sgd, lr=0.1)
    with model.no_sync():
        model.backward(model_loss, BATCH)
        optimizer.step()


def copy_wrapped(_):
    """A copy of a wrapped model is wrapped by way of the model that it was made from."""
    model = gshard.pytorch.DistributedDataParallel(plain())
    other = gshard.pytorch.DistributedDataParallel(pair(seed=1)[0])
    other.load_state_dict(copy.deepcopy(model).state_dict())
    return other.state_dict(), model.state_dict()


RATE = optax.cosine_decay_schedule(0.1, 10)


def over_a_schedule(lr: Any) -> Any:
    """A state of a learning rate that was a schedule is loaded with another one."""
    own, new = zero(lr=RATE), zero(lr=lr)
    grads = jax.grad(loss_fn)(params(), BATCH)
    own.step(grads)
    new.load_state_dict(own.state_dict())
    return new.step(grads), grads


def fixed_after_a_schedule(_):
    found, grads = over_a_schedule(optax.constant_schedule(0.5))
    plain, tx = params(), optax.adam(0.5)
    state = tx.update(grads, tx.init(plain))[1]
    return found, optax.apply_updates(plain, tx.update(grads, state)[0])


def evaluated(_):
    """`train(False)` and `train(mode=False)`, as PyTorch's users turn dropout off."""
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), plain())
    by_position, by_name = (gshard.pytorch.DistributedDataParallel(model) for _ in range(2))
    by_position.train(False)
    by_name.train(mode=False)
    return [x(BATCH["x"]) for x in (by_position, by_name)], [plain()(BATCH["x"])] * 2


def missing_process(func: Any, *args: Any, **options: Any) -> Any:
    return gshard.distributed.spawn(func, *args, **options)


def saved(path: Any, model: Any, **options: Any) -> Any:
    gshard.paddle.save_group_sharded_model(model, path / "out", **options)


def copied(_):
    model = wrapped("os")[0]
    return copy.copy(model)(BATCH["x"]), model(BATCH["x"])


def data_parallel() -> Any:
    return gshard.paddle.DataParallel(plain())


ROWS = {
    "the model that was wrapped is updated, and not the wrapped one": warned(
        lambda _: optimizer_of(wrapped_one=False), "it is a copy", "of the wrapped model"
    ),
    "an optimizer of Flax updates the wrapped model": right(
        lambda _: optimizer_of(wrapped_one=True)
    ),
    "the tx of a wrapped optimizer is replaced": refused(
        other_tx, "optimizer.tx was replaced", "optimizer.set_lr(value)"
    ),
    "a wrapped model that sows is called": refused(
        sown, "model(...) adds or removes", "hidden", "nnx.capture(model, nnx.Intermediate)"
    ),
    "what a wrapped model sows is captured in an eval step": right(captured),
    "group_sharded_parallel without a model": refused(
        lambda _: gshard.paddle.group_sharded_parallel(None, None, "os"),
        *("None", "group_sharded_parallel", "nnx.Module"),
    ),
    "group_sharded_parallel of parameters": refused(
        lambda _: gshard.paddle.group_sharded_parallel(params(), ADAM, "os"), "nnx.Module"
    ),
    "model and optimizer are swapped": refused(
        lambda _: gshard.paddle.group_sharded_parallel(ADAM, plain(), "os"), "nnx.Module"
    ),
    "level='p_g'": refused(lambda _: wrapped("p_g"), "'p_g'", "p_g_os"),
    "level='4'": refused(lambda _: wrapped("4"), "level='4'", "p_g_os"),
    "a wrapped model is pickled": refused(
        lambda _: pickle.dumps(wrapped("os")[0]), "cannot be pickled", "Pickle its state_dict()"
    ),
    "a wrapped model is copied by copy.copy": right(copied),
    "an NNX optimizer of another model": refused(of_another_model, "another optimizer", "tx.init"),
    "the class of an optimizer": refused(lambda _: wrapped(tx=optax.adam), "optimizer"),
    "a scaler that is a number": refused(lambda _: wrapped(scaler=1024.0), "scaler"),
    "a group that is a number": refused(lambda _: wrapped(group=4), "group"),
    "offload=1": refused(lambda _: wrapped(offload=1), "offload"),
    "buffer_max_size=-1": refused(lambda _: wrapped(buffer_max_size=-1), "buffer_max_size"),
    "a model that is wrapped already": refused(wrap_twice, "already"),
    "a copy of a wrapped model is wrapped": refused(
        lambda _: gshard.pytorch.DistributedDataParallel(copy.deepcopy(data_parallel())),
        *("wrapped already", "load_state_dict(this.state_dict())"),
    ),
    "the values of a copy of a wrapped model": right(copy_wrapped),
    "the first of two optimizers for one DistributedDataParallel": refused(
        first_of_two_optimizers, "made for this model since", "add_param_group"
    ),
    "a step within no_sync": refused(step_within_no_sync, "outside it; model.clear_gradients()"),
    "step before backward": refused(step_first, "no gradients"),
    "update before backward": refused(
        lambda _: (lambda model, optimizer, _: optimizer.update(model, model.grads))(*wrapped()),
        "there are no gradients. Call model.backward(loss_fn, batch)",
    ),
    "state_dict of a scaler that was not given to group_sharded_parallel": refused(
        lambda _: gshard.GradScaler().state_dict(), "only holds settings"
    ),
    "step of a scaler that was not given to group_sharded_parallel": refused(
        lambda _: gshard.GradScaler().step(None),
        *("GradScaler.step: a gshard.GradScaler only holds settings", "pass it as scaler="),
    ),
    "step twice": right(twice),
    "clear_grad is forgotten": right(not_cleared),
    "loss.backward()": raw(eager_backward, AttributeError, "backward"),
    "backward with a loss that was computed": refused(
        lambda _: (lambda m: m.backward(model_loss(plain(), BATCH)))(wrapped()[0]), "backward"
    ),
    "backward without a batch": refused(lambda _: wrapped()[0].backward(model_loss), "batch"),
    "backward with inputs and targets apart": refused(
        lambda _: wrapped()[0].backward(model_loss, BATCH["x"], BATCH["y"]), "(x, y)"
    ),
    "hasattr of what a copy lacks": right(
        lambda _: (hasattr(nnx.clone(wrapped()[0]), "backward"), False)
    ),
    "batch and loss are swapped": refused(
        lambda _: wrapped()[0].backward(BATCH, model_loss), "backward"
    ),
    "backward with 13 examples": refused(
        lambda _: wrapped()[0].backward(model_loss, {k: v[:13] for k, v in BATCH.items()}),
        *("13 examples", "8 devices"),
    ),
    "a learning rate that is text": refused(
        lambda _: wrapped(tx=optax.inject_hyperparams(optax.sgd)(0.1))[1].set_lr("fast"), "fast"
    ),
    "a learning rate of an optimizer that has none to set": refused(
        lambda _: wrapped()[1].set_lr(0.1), "inject_hyperparams"
    ),
    "save_group_sharded_model of a plain model": refused(
        lambda path: saved(path, plain()), "group_sharded_parallel"
    ),
    "load_group_sharded_model of nothing": refused(
        lambda path: gshard.paddle.load_group_sharded_model(wrapped()[0], path / "no"), "no"
    ),
    "paddle.load of nothing": refused(lambda path: gshard.paddle.load(path / "no"), "no"),
    "paddle.save of a model": refused(
        lambda path: gshard.paddle.save(plain(), path / "x"),
        *("is not a state dict", "model.state_dict()"),
    ),
    "paddle.save of a set": refused(
        lambda path: gshard.paddle.save({"epochs": [1, {2}]}, path / "x"),
        *("epochs/1 is a set", "dictionaries and lists"),
    ),
    "paddle.save with swapped arguments": refused(
        lambda path: gshard.paddle.save(path / "x", {"w": np.ones(3)}), "path=a dict"
    ),
    "set_state_dict of another model": refused(
        lambda _: gshard.paddle.set_state_dict(plain(), {"kernel": np.ones((2, 2))}), "kernel"
    ),
    "set_state_dict with unknown names": warned(
        lambda _: gshard.paddle.set_state_dict(plain(), {"weight": np.ones((2, 2))}),
        "does not know",
    ),
    "a whole checkpoint for a model": warned(
        lambda _: gshard.paddle.set_state_dict(
            plain(), {"model": gshard.paddle.state_dict(plain()), "epoch": 3}
        ),
        "Its entry 'model' has such names: pass that entry.",
    ),
    "names with the prefix of PyTorch's DDP": refused(
        prefixed, "Its names begin with 'module.'", "name.removeprefix('module.')"
    ),
    "a state dict of PyTorch": refused(
        of_pytorch,
        "weight is kernel, scale or embedding here",
        "transpose the kernels of PyTorch's",
    ),
    "an optimizer's state dict for a model": refused(
        of_an_optimizer, "It is the state of an optimizer.", "Nothing was changed"
    ),
    "None for the gradient of no part of the model": refused(
        lambda _: no_gradient_of("layer"),
        "the gradient of 'layer' is None",
        "Did you mean 'layers'?",
    ),
    "None for the gradient of a part by its name in a state dict": refused(
        lambda _: no_gradient_of("layers.0"), "Write grads['layers']['0'] = None."
    ),
    "a whole checkpoint for an optimizer": refused(
        lambda _: local_state(lambda own: {"optimizer": own, "epoch": 3}),
        "its entry 'optimizer' is: pass that entry",
    ),
    "the arguments of PyTorch's GradScaler": refused(
        lambda _: gshard.GradScaler(init_scale=1024.0),
        "It is init_loss_scaling= here.",
        error=gshard.ArgumentTypeError,
    ),
    "state_dict of a number": refused(lambda _: gshard.paddle.state_dict(3), "3"),
    "DataParallel of a model with its own scale_loss": refused(
        lambda _: gshard.paddle.DataParallel(Scaling(16, 8, rngs=nnx.Rngs(0))),
        "Scaling has scale_loss of its own",
    ),
    "DataParallel of a function": refused(lambda _: gshard.paddle.DataParallel(loss_fn), "nnx"),
    "DataParallel of parameters": refused(lambda _: gshard.paddle.DataParallel(params()), "nnx"),
    "fused_allreduce_gradients of None": refused(
        lambda _: gshard.paddle.fused_allreduce_gradients(None), "fused_allreduce_gradients"
    ),
    "ZeroRedundancyOptimizer without parameters": refused(lambda _: zero({}), "params are empty"),
    "an optimizer instead of its class": refused(
        lambda _: zero(None, optax.adam(0.1)), "optax.adam"
    ),
    "the name of an optimizer": refused(lambda _: zero(None, "adam"), "'adam'"),
    "PyTorch's betas": refused(lambda _: zero(betas=(0.9, 0.99)), "'betas'", "adam", "b1=0.9"),
    "lr is text": refused(lambda _: zero(lr="0.1"), "lr"),
    "an unknown hyperparameter": refused(lambda _: zero(momentun=0.9), "momentun"),
    "partition='rounds'": refused(lambda _: zero(partition="rounds"), "'rounds'", "'greedy'"),
    "a parameter in two groups": refused(
        lambda _: zero([{"params": params()["w"]}, {"params": params()["w"]}][:1] * 2), "twice"
    ),
    "a group without parameters": refused(lambda _: zero([{"lr": 0.1}]), "params"),
    "ZeRO step without gradients": refused(lambda _: zero().step(), "step needs gradients"),
    "ZeRO step with other gradients": refused(
        lambda _: zero().step({"v": np.ones(3)}), "gradients"
    ),
    "ZeRO step with gradients of other shapes": refused(
        lambda _: zero().step({"w": np.ones((2, 2), np.float32), "b": np.ones(8, np.float32)}), "w"
    ),
    "ZeRO step with gradients": right(one_step),
    "a state dict of another optimizer": refused(
        lambda _: local_state(lambda s: ZeRO(params(), optax.sgd, lr=0.1).state_dict()),
        *("load_state_dict", "missing"),
    ),
    "a state dict that is None": refused(lambda _: local_state(lambda s: None), "state_dict"),
    "add_param_group of arrays": refused(
        lambda _: zero().add_param_group([jnp.ones(3)]), "add_param_group"
    ),
    "consolidate to a process that is not there": refused(
        lambda _: zero().consolidate_state_dict(to=1), "to=1"
    ),
    "Join of nothing": refused(lambda _: gshard.pytorch.Join([]), "Join"),
    "Join of an optimizer alone": refused(lambda _: gshard.pytorch.Join([zero()]), "DataParallel"),
    "initialize after JAX has started": refused(
        lambda _: gshard.distributed.initialize("localhost:1234", 2, 0), "before"
    ),
    "initialize with an unknown option": refused(
        lambda _: gshard.distributed.initialize(heartbeat_timeout=3),
        *("'heartbeat_timeout'", "Did you mean 'heartbeat_timeout_seconds'?"),
    ),
    "initialize with process 2 of 2": refused(
        lambda _: gshard.distributed.initialize("localhost:1234", 2, 2), "process_id=2"
    ),
    "initialize with a negative hang_timeout": refused(
        lambda _: gshard.distributed.initialize(hang_timeout=-1), "hang_timeout=-1"
    ),
    "spawn of a lambda": refused(lambda _: missing_process(lambda: None, nprocs=2), "lambda"),
    "spawn of no function": refused(lambda _: missing_process(3, nprocs=2), "3"),
    "spawn of 0 processes": refused(lambda _: missing_process(print, nprocs=0), "nprocs=0"),
    "spawn with arguments that are no sequence": refused(
        lambda _: missing_process(print, 3, nprocs=2), "args=3"
    ),
    "until_preempted of a batch": refused(
        lambda _: list(gshard.distributed.until_preempted(3)), "until_preempted"
    ),
    "until_preempted whose last is no function": refused(
        lambda _: list(gshard.distributed.until_preempted([1], last=3)), "last=3"
    ),
    "import of a name that PyTorch has": refused(
        lambda _: exec("from gshard.pytorch import FullyShardedDataParallel"),
        *("FullyShardedDataParallel", "shard_train_state"),
    ),
    "a class of PyTorch whose arguments are others": refused(
        lambda _: gshard.pytorch.DataParallel(plain(), [0, 1]), "It is DistributedDataParallel"
    ),
    "a function that PyTorch has": refused(
        lambda _: gshard.pytorch.init_process_group("nccl"), "gshard.distributed.initialize()"
    ),
    "a class that Paddle has": refused(
        lambda _: gshard.paddle.GroupShardedStage3(plain()), "group_sharded_parallel", "'p_g_os'"
    ),
    "get_rank of gshard.distributed": refused(
        lambda _: gshard.distributed.get_rank(), "gshard.distributed.process_index()"
    ),
    "parameters by name, as PyTorch gives them": refused(
        lambda _: gshard.paddle.DataParallel(plain()).named_parameters(), "nnx.to_flat_state"
    ),
    "clipping while the optimizer updates in backward": refused(
        clip_too_late, "overlap_with_ddp", "clip_by_global_norm"
    ),
    "groups in place of param_groups": refused(
        lambda _: setattr(zero(), "param_groups", [{"lr": 1.0}]), "add_param_group"
    ),
    "a learning rate of PyTorch's name in a saved state": right(edited_state),
    "a number for a learning rate that is a schedule": refused(
        lambda _: zero(lr=RATE).param_groups[0].update(lr=0.5), "lr=optax.constant_schedule(0.5)"
    ),
    "a fixed learning rate for the state of a schedule": refused(
        lambda _: over_a_schedule(0.5), "unknown 1/count", "lr=optax.constant_schedule("
    ),
    "a constant schedule for the state of a schedule": right(fixed_after_a_schedule),
    "a hyperparameter of a saved state that nobody takes": warned(
        lambda _: local_state(lambda x: {**x, "param_groups": [{"lamb": 1.0}]}),
        *("lamb", "are ignored", "learning_rate"),
    ),
    "a learning rate below 0 in a saved state": refused(
        lambda _: local_state(lambda x: {**x, "param_groups": [{"lr": -1.0}]}),
        *("learning_rate=-1.0", ">= 0"),
    ),
    "lr=nan": refused(lambda _: zero(lr=float("nan")), "lr=nan", ">= 0"),
    "a group's lr below 0": refused(
        lambda _: zero().param_groups[0].update(lr=-0.1), "lr=-0.1", ">= 0"
    ),
    "a class without its optimizer": refused(
        lambda _: ZeRO(params(), lr=0.1),
        *("optimizer_class=", "optax.adamw"),
        error=gshard.ArgumentTypeError,
    ),
    "an argument of FSDP": refused(
        lambda _: gshard.pytorch.DistributedDataParallel(plain(), cpu_offload=True),
        *("cpu_offload", '"fsdp"'),
        error=gshard.ArgumentTypeError,
    ),
    "group_sharded_parallel without a level": refused(
        lambda _: gshard.paddle.group_sharded_parallel(plain(), ADAM),
        *("level=", '"p_g_os"'),
        error=gshard.ArgumentTypeError,
    ),
    "new_group(ranks=)": refused(
        lambda _: gshard.distributed.new_group(ranks=[0, 1]),
        *("devices=", "not of processes"),
        error=gshard.ArgumentTypeError,
    ),
    "gshard.DataParallel": refused(
        lambda _: gshard.DataParallel, "It is gshard.paddle.DataParallel"
    ),
    "gshard.DistributedDataParallel": refused(
        lambda _: gshard.DistributedDataParallel, "It is gshard.pytorch.DistributedDataParallel"
    ),
    "from gshard import FSDP": refused(
        lambda _: exec("from gshard import FSDP"), "shard_train_state(state, mesh"
    ),
    "a moment is set in opt.state": refused(
        set_moment, "snapshot", "opt.load_state_dict(state)", error=gshard.ArgumentTypeError
    ),
    "a Variable as a key of opt.state": raw(
        lambda _: zero().state[plain().kernel], KeyError, "no parameter a Param. A key is a path"
    ),
    "an entry of a moment is set in opt.state": raw(set_entry, ValueError, "read-only"),
    "gradients of one layer set to None before the next backward": right(grads_of_the_last),
    "train(False)": right(evaluated),
    "train of a text": refused(lambda _: data_parallel().train("eval"), "mode='eval'"),
    "grads = None": refused(no_grads, "there are no gradients"),
    "copy.deepcopy of a ZeroRedundancyOptimizer": refused(
        lambda _: copy.deepcopy(zero()), "cannot be copied", "opt.state_dict()"
    ),
    "nnx.update with full parameters at p_g_os": refused(
        full_parameters, "bias is [3], stored as [8]", "model.set_state_dict"
    ),
    "a barrier in one process": right(lambda _: (int(gshard.distributed.barrier() is None), 1)),
}

"""Train a small model on real text, with its state sharded over all devices.

python quickstart.py  # all GPUs or TPUs of this machine, or its CPU
gshard launch --nproc_per_node 2 --virtual_devices 4 quickstart.py  # two processes
"""

from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import gshard

gshard.distributed.initialize()  # joins the processes of a job; one process needs nothing else

# %% Data: the source code of gshard, in pieces of 65 bytes
text = b"".join(path.read_bytes() for path in sorted(Path(gshard.__file__).parent.rglob("*.py")))
pieces = np.frombuffer(text[: len(text) // 65 * 65], np.uint8).reshape(-1, 65)
train, held_out = np.split(np.random.default_rng(0).permutation(pieces), [-960])

# %% A Flax model that predicts each byte from those before it
layers = [nn.Embed(256, 96), nn.Conv(256, 8, padding="CAUSAL"), nn.gelu, nn.Dense(256)]
model = nn.Sequential(layers)


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


params = model.init(jax.random.key(0), train[:1, :-1])["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3))

# %% Shard the train state over all devices
state, plan = gshard.shard_train_state(state, gshard.make_mesh(), level="zero3")
step = gshard.make_train_step(loss_fn, plan)
print(plan)

# %% Train and save; the next run resumes from the newest checkpoint
STEPS, done = 200, 0
batches = gshard.DataLoader(train, 96, plan, seed=0, num_epochs=None)
with gshard.Checkpointer("quickstart-checkpoints", keep_last=2) as checkpointer:
    if checkpointer.latest_step() is not None:
        restored = checkpointer.restore(like=state)
        state, done = restored.state, restored.step
        batches.load_state_dict(restored.data_state)
        print(f"resumed from step {restored.step} of {STEPS} in {checkpointer.directory}")
    for number, batch in zip(range(done + 1, STEPS + 1), batches, strict=False):
        state, metrics = step(state, batch)
        if number % 50 == 0:
            print(f"step {number}: loss {float(metrics['loss']):.4f}")
            checkpointer.save(number, state, data_state=batches.state_dict())

# %% Evaluate on the pieces that were held out
evaluate = gshard.make_eval_step(loss_fn, plan)
batches = gshard.DataLoader(held_out, 96, plan, shuffle=False)
print(f"held-out loss {np.mean([evaluate(state, batch) for batch in batches]):.4f}")

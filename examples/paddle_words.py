"""Paddle's example, on JAX and on real text: one Linear(1000, 1000) with AdamW, sharded.

    python -m examples.paddle_words [--level p_g_os] [--steps 200]

The task: given the four words before, which of the 1000 most frequent words of Python's standard
library comes next? Inputs count the four words, so the layer learns how often words follow others.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

import numpy as np
import optax
from flax import nnx

import gshard
from examples.text import standard_library

WORDS, BEFORE, EXAMPLES = 1000, 4, 512


def frequent_words() -> np.ndarray:
    """The text as numbers of its most frequent words; others are left out. int32 (words,)."""
    found = re.findall(rb"[A-Za-z_]+", standard_library().tobytes())
    numbers = {word: i for i, (word, _) in enumerate(Counter(found).most_common(WORDS))}
    return np.array([numbers[word] for word in found if word in numbers], np.int32)


def batch(words_N: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the words before, float32 (examples, words); the next word, int32 (examples,)."""
    rng = np.random.default_rng(step)
    at_B = rng.integers(BEFORE, len(words_N), EXAMPLES)
    counts_BxW = np.zeros((EXAMPLES, WORDS), np.float32)
    for i in range(1, BEFORE + 1):
        np.add.at(counts_BxW, (np.arange(EXAMPLES), words_N[at_B - i]), 1.0)
    return counts_BxW, words_N[at_B]


def loss_fn(model, data):
    """Mean cross-entropy."""
    inputs, labels = data
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels).mean()


def train(level: str, steps: int) -> tuple[list[float], nnx.Module]:
    """Losses, and the model."""
    words_N = frequent_words()
    model = nnx.Linear(WORDS, WORDS, rngs=nnx.Rngs(0))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate=0.05, weight_decay=0.00001)
    )
    model, optimizer, _ = gshard.paddle.group_sharded_parallel(
        model, optimizer, level, **({"segment_size": 2**18} if level == "p_g_os" else {})
    )
    losses = []
    for step in range(steps):
        loss = model.backward(loss_fn, batch(words_N, step))
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.4f}", flush=True)
    return losses, model


def main() -> None:
    """Trains, and prints the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", default="p_g_os", choices=["os", "os_g", "p_g_os"])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    gshard.virtual_devices(8)
    _, model = train(args.level, args.steps)
    print(model.plan)


if __name__ == "__main__":
    main()

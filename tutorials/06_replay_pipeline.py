"""
A replay buffer beside the learner
==================================

A deep Q-network learns CartPole. Its replay buffer is a dict of tensors in host memory, and each
batch of it is gathered one step ahead: while the learner works on one batch, the rows of the next
are read and sent. We train twice from the same seed, with the gather and with plain indexing, and
hold every batch and every episode of the one against those of the other.

With a CUDA device the learner works there. Without one it works on the simulated device, where
every operator is a round through the host's memory: this takes some seconds per run, and times mean
nothing. ``--short`` does a few steps only, which shows that both ways get the same batches, and not
that anything is learnt.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import tdcopier

try:
    import gymnasium
except ImportError as missing:
    print(f"skipped: all of it ({missing}; pip install gymnasium)")
    sys.exit()

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"target: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    print(f"target: {device}, the simulated device (no CUDA device here)")

SHORT = "--short" in sys.argv
SEED = 0

# %%
# The buffer
# ----------
# One tensor per field with a row per transition, allocated once. Writers fill it as a ring: when it
# is full, the oldest rows are overwritten. ``discount`` is 0 where an episode ended by a fall.

ROWS = 100_000
OBSERVED = 4  # numbers in an observation: position, angle, and how fast they change


class Replay:
    def __init__(self, seed):
        self.rows = {
            "observation": torch.zeros(ROWS, OBSERVED),
            "action": torch.zeros(ROWS, 1, dtype=torch.int64),
            "reward": torch.zeros(ROWS),
            "discount": torch.zeros(ROWS),
            "next_observation": torch.zeros(ROWS, OBSERVED),
        }
        self.written = 0
        self.generator = torch.Generator().manual_seed(seed)

    def write(self, transitions):
        """Append as many rows as the leaves of ``transitions`` have."""
        count = len(transitions["reward"])
        index = torch.arange(self.written, self.written + count) % ROWS
        for name, leaf in transitions.items():
            self.rows[name][index] = leaf
        self.written += count

    def draw(self, count):
        """The index of a batch: rows that have been written, with repeats."""
        full = min(self.written, ROWS)
        return torch.randint(full, (count,), generator=self.generator)


# %%
# What the calls wait for
# -----------------------
# :func:`tdcopier.start_gather` reads the rows of an index and sends them, and returns at once. The
# rows of every leaf are read straight into the memory that the transfer reads; there is no batch on
# the host in between. Three calls wait for it:
#
# - ``wait_gathered()`` holds the host until every row has been read. From then on a writer may
#   overwrite them. It does not wait for the transfer, nor for anything the device does.
# - ``wait()`` gives the batch, and makes the current stream wait for its bytes.
# - ``get()`` gives the batch, and makes the host wait too.
#
# The rows that a gather still reads must not be written, which is why the loop below asks before it
# writes. Here a row is overwritten right after that, and the batch has the values from before.

replay = Replay(SEED)
replay.write({name: leaf[:64] + 1 for name, leaf in replay.rows.items()})
index = replay.draw(32)
handle = tdcopier.start_gather(replay.rows, index, device)
handle.wait_gathered()
replay.rows["reward"].fill_(-1)  # a writer
batch = handle.get()
print({name: tuple(leaf.shape) for name, leaf in batch.items()})
assert batch["reward"].tolist() == [1.0] * 32

# %%
# The environments
# ----------------
# Sixteen, so that the network that picks the actions is asked once for all of them. It is a copy
# on the host. An action is random with the probability ``explore``, which falls.
#
# CartPole pays 1 for each step until the pole falls, so that all values are near 1 / (1 - discount)
# and differ little. We take 1 from every reward of an endless episode: 0 for a step, -1 for a fall.
# Policies are ranked by it as before, and a fresh network, whose values are near 0, starts as an
# optimist.

ENVIRONMENTS = 16
DISCOUNT = 0.98


class Environments:
    def __init__(self, seed):
        self.all = [gymnasium.make("CartPole-v1") for _ in range(ENVIRONMENTS)]
        first = [env.reset(seed=seed + at)[0] for at, env in enumerate(self.all)]
        self.observations = torch.stack([torch.from_numpy(one) for one in first])
        self.generator = torch.Generator().manual_seed(seed)
        self.running = [0.0] * ENVIRONMENTS
        self.steps = 0
        self.episodes = []  # (environment steps so far, return), in the order in which they ended

    def step(self, actor, explore):
        """One step of each: the transitions, as rows for the buffer."""
        shape = (ENVIRONMENTS, 1)
        greedy = actor(self.observations).argmax(1, keepdim=True)
        random = torch.randint(2, shape, generator=self.generator)
        choice = torch.rand(shape, generator=self.generator) < explore
        action = torch.where(choice, random, greedy)
        fell = torch.zeros(ENVIRONMENTS)
        following = torch.empty_like(self.observations)
        observations, self.observations = self.observations, torch.empty_like(self.observations)
        self.steps += ENVIRONMENTS
        for at, env in enumerate(self.all):
            seen, reward, terminated, truncated, _ = env.step(action[at].item())
            following[at] = torch.from_numpy(seen)
            fell[at] = float(terminated)
            self.running[at] += reward
            if terminated or truncated:
                self.episodes.append((self.steps, self.running[at]))
                self.running[at] = 0.0
                seen, _ = env.reset()
            self.observations[at] = torch.from_numpy(seen)
        return {
            "observation": observations,
            "action": action,
            "reward": -fell,
            "discount": DISCOUNT * (1 - fell),
            "next_observation": following,
        }


# %%
# The learner
# -----------
# An ordinary one: a network, its slower copy that says what the next state is worth, and Adam. It
# reads nothing back, so on a real device the host enqueues a step and goes on. The weights that
# pick actions come to the host by one packed copy into the actor's own tensors, by
# :func:`tdcopier.copy_into`.

UPDATES = 60 if SHORT else 800
BATCH = 256


def network():
    return nn.Sequential(
        nn.Linear(OBSERVED, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


class Learner:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.actor = network().requires_grad_(False)
        self.values = network().to(device)
        self.slower = network().to(device).requires_grad_(False)
        self.slower.load_state_dict(self.values.state_dict())
        self.send_weights()
        parameters = self.values.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=4e-3, fused=True)
        self.updates = 0

    def send_weights(self):
        tdcopier.copy_into(self.values.state_dict(), self.actor.state_dict()).get()

    def step(self, batch):
        worth = self.slower(batch["next_observation"]).amax(1)
        wanted = torch.addcmul(batch["reward"], batch["discount"], worth)
        found = self.values(batch["observation"]).gather(1, batch["action"])[:, 0]
        loss = (found - wanted).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = 4e-3 * (1 - 0.9 * self.updates / UPDATES)
        self.optimizer.step()
        self.updates += 1
        if self.updates % 10 == 0:
            self.slower.load_state_dict(self.values.state_dict())
        if self.updates % 2 == 0:
            self.send_weights()


# %%
# The loop
# --------
# Index drawn, gather started; then the learner's step on the batch before, and a step of the
# environments on the host, while rows are read and sent; then the writer, as soon as every row has
# been read. So each batch is one step old when the learner gets it, and nobody has waited for it.
#
# The plain way reads rows leaf by leaf, makes a batch on the host, and sends it leaf by leaf, all
# of it inside the call. It takes its batches at the same places of the loop, one step ahead as
# well: only then can the two be compared.


class Plain:
    """Indexing and ``.to()``, behind the names that a handle has."""

    def __init__(self, rows, index, device):
        self.batch = {name: leaf[index].to(device) for name, leaf in rows.items()}

    def wait(self):
        return self.batch

    def wait_gathered(self):
        """It has been read in the call."""


FIRST_ROWS = 30 * ENVIRONMENTS  # before the first batch


def train(start, seed=SEED):
    """Train with batches that ``start(rows, index, device)`` begins to fetch."""
    replay, environments, learner = Replay(seed), Environments(seed), Learner(seed)
    batches, seconds, ahead = [], 0.0, None
    while learner.updates < UPDATES:
        begin = time.perf_counter()
        following = None
        if replay.written >= FIRST_ROWS:
            following = start(replay.rows, replay.draw(BATCH), device)
        batch = None if ahead is None else ahead.wait()
        seconds += time.perf_counter() - begin
        if batch is not None:
            learner.step(batch)
            batches.append(batch)  # for the comparison below
        explore = max(0.04, 1 - learner.updates / 200)
        transitions = environments.step(learner.actor, explore)
        if following is not None:
            following.wait_gathered()
        replay.write(transitions)
        ahead = following
    return environments.episodes, batches, seconds


runs = {}
for name, start in {"plain indexing": Plain, "start_gather": tdcopier.start_gather}.items():
    begin = time.perf_counter()
    runs[name] = train(start)
    episodes, batches, seconds = runs[name]
    print(f"{name}: {len(episodes)} episodes, {time.perf_counter() - begin:.1f} s")
    if device.type == "cuda":  # elsewhere it means nothing
        print(f"    the host in calls for batches: {seconds / UPDATES * 1e6:.0f} us per update")

# %%
# The same training
# -----------------
# Every batch of the one run equals that of the other, bit for bit. They come back to the host for
# this in one packed copy. So the networks are the same after every step, and so are all episodes.


def bits(batch):
    return {name: leaf.numpy().tobytes() for name, leaf in batch.items()}


plain, gathered = (tdcopier.copy(batches, "cpu") for _, batches, _ in runs.values())
assert len(plain) == len(gathered) == UPDATES
for number, (one, other) in enumerate(zip(plain, gathered, strict=True)):
    assert bits(one) == bits(other), f"batch {number} differs"
print(f"{UPDATES} batches of {BATCH} rows are the same, bit for bit")

(episodes, _, _), (expected, _, _) = runs["start_gather"], runs["plain indexing"]
assert episodes == expected
first, last = (sum(returns for _, returns in part) / 20 for part in (episodes[:20], episodes[-20:]))
print(f"mean return of the first 20 episodes: {first:.0f}, of the last 20: {last:.0f}")
assert SHORT or last > 150, "it has not learnt"

# %%
# The curves
# ----------
# Against steps of the environment, what the learner gets is the same either way, and so is the
# curve. What differs is who waits: plain indexing holds the host in every call. With rows as short
# as these that is little; with images it is most of a step.


def draw():
    """Every episode, and the mean of twenty, for both runs."""
    if "__file__" in globals():
        import matplotlib

        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    looks = {
        "plain indexing": {"color": "#9dc6ec", "linewidth": 7},
        "start_gather": {"color": "#b3261e", "linewidth": 1.5},
    }
    for name, (episodes, _, _) in runs.items():
        steps = [at for at, _ in episodes]
        returns = torch.tensor([total for _, total in episodes])
        means = returns.unfold(0, min(20, len(returns)), 1).mean(1)
        axes.plot(steps[-len(means) :], means, label=f"{name}, mean of 20", **looks[name])
    axes.scatter(steps, returns, s=5, color="#777777", alpha=0.4, label="episodes of both")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return")
    axes.set_title("A DQN on CartPole-v1: the same curve, whoever fetches the batches", loc="left")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


if SHORT:
    print("skipped: the picture (--short)")
else:
    try:
        figure = draw()
    except ImportError as missing:
        print(f"skipped: the picture ({missing})")
    else:
        if "__file__" in globals():  # a gallery has none, and takes the figure itself
            picture = Path(__file__).resolve().parents[1] / "build" / "06_replay_pipeline.png"
            picture.parent.mkdir(exist_ok=True)
            figure.savefig(picture, dpi=120)
            print(f"picture: {picture.relative_to(picture.parents[1])}")

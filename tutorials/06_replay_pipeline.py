"""
A replay buffer beside the learner
==================================

A deep Q-network learns CartPole from a replay buffer, a dict of tensors in host memory.
While the learner works on one batch, tdcopier reads and sends the rows of the next.
We train twice from the same seed, once with the gather and once with plain indexing,
and compare all batches and episodes of the two runs.

The learner works on a CUDA device if the machine has one, and otherwise on the simulated device,
where each operator runs on the host and a run takes some seconds.
``--short`` leaves out the pictures and most of the steps.
Short runs show that both ways get the same batches, and not that the network learns.
"""

import sys
import time

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
# The buffer has one tensor for each field, with a row for each transition.
# It is written as a ring: when it is full, new rows overwrite the oldest.
# ``discount`` is 0 where an episode ended by a fall.

ROWS = 100_000
OBSERVED = 4  # position, angle, and their rates of change


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
        """Append the rows of ``transitions``."""
        count = len(transitions["reward"])
        index = torch.arange(self.written, self.written + count) % ROWS
        for name, leaf in transitions.items():
            self.rows[name][index] = leaf
        self.written += count

    def draw(self, count):
        """The index of a batch: written rows, with repeats."""
        full = min(self.written, ROWS)
        return torch.randint(full, (count,), generator=self.generator)


# %%
# The calls of a gather
# ---------------------
# :func:`tdcopier.start_gather` reads the rows of an index straight into the staging buffers,
# sends them, and returns immediately.
#
# - ``wait_gathered()`` blocks the host until every row has been read.
#   From then on a writer may overwrite them.
# - ``wait()`` gives the batch, and makes the current stream wait for its bytes.
# - ``get()`` gives the batch, and blocks the host until it has arrived.
#
# Here a writer overwrites all rows right after ``wait_gathered()``,
# and the batch has the former values.

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
# One call of a network on the host, a copy of the learner's, picks the actions of all sixteen
# environments; an action is random with the probability ``explore``, which decreases.
#
# The reward is 0 for a step and -1 for a fall, instead of CartPole's 1 for each step:
# this ranks policies in the same order, and the values of a fresh network, near 0, are optimistic.

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
        # (environment steps so far, return), in the order of their ends
        self.episodes = []

    def step(self, actor, explore):
        """Step each environment; return rows for the buffer."""
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
# The learner has a network, a slower copy of it that estimates the value of the next state,
# and the optimizer Adam.
# It reads no result back, so on a real device the host enqueues a step and continues.
# :func:`tdcopier.copy_into` copies the weights into the tensors of the actor on the host.

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
        tdcopier.copy_into(self.values.state_dict(), self.actor.state_dict())

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
# One iteration of the loop has four parts:
#
# 1. It draws an index and starts the gather.
# 2. The learner does a step on the previous batch, and the environments do a step on the host.
# 3. ``wait_gathered()`` blocks until every row has been read.
# 4. The writer appends the new transitions.
#
# Plain indexing reads and sends the rows leaf by leaf, inside the call,
# and takes its batches at the same places of the loop.


class Plain:
    """Indexing and ``.to()``, with the methods of a handle."""

    def __init__(self, rows, index, device):
        self.batch = {name: leaf[index].to(device) for name, leaf in rows.items()}

    def wait(self):
        return self.batch

    def wait_gathered(self):
        """Do nothing: the constructor has read the rows."""


FIRST_ROWS = 30 * ENVIRONMENTS  # before the first batch


def train(start, seed=SEED):
    """Train with the batches of ``start(rows, index, device)``."""
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
    runs[name] = train(start)
    episodes, batches, seconds = runs[name]
    print(f"{name}: {len(episodes)} episodes")
    if device.type == "cuda":  # times of the simulated device say nothing
        print(f"    the host in calls for batches: {seconds / UPDATES * 1e6:.0f} us per update")

# %%
# Both runs are the same
# ----------------------
# Every batch of one run equals that of the other, bit for bit,
# and so do the networks after every step and all episodes.


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
assert SHORT or last > 150, "the network has not learned"

# %%
# The curves
# ----------
# Both ways give the same curve over steps of the environment.

if SHORT:
    print("skipped: the pictures (--short)")
    pictures = None
else:
    try:
        import pictures
    except ImportError as missing:
        print(f"skipped: the pictures ({missing})")
        pictures = None
if pictures is not None:
    episodes = {name: run[0] for name, run in runs.items()}
    pictures.curves("DQN on CartPole-v1: the same curve for both ways", episodes, mean_of=20)

# %%
# The time of a step
# ------------------
# Rows with images take a larger part of a step than those of CartPole.
# The picture shows a learner's step with batches of Atari frames, from the benchmarks.
# "On the device already" is a learner that needs no batches.

if pictures is not None and pictures.RESULTS.exists():
    replays = pictures.results("replay")
    frames = replays["replays"]["atari_256"]
    learner, found = next(iter(frames["learners"].items()))
    ways = [
        "on the device already",
        "tdcopier, start_gather() one batch ahead",
        "leaf[index].to(device)",
    ]
    times = {way: found["step"][way] for way in ways}
    pictures.bars(f"A learner's step ({frames['title']}, {learner})", replays, times)

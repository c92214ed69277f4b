"""
Replay and learning in one CUDA graph
=====================================

A learner that samples rows of a replay storage in host memory usually needs the host in each step:
it draws an index, gathers rows, sends them, and launches the kernels of the step.
Here the device does all of that.
The storage is pinned, so that the device reads its rows itself; the index is drawn on the device;
and the rows go to a batch that exists, so that their addresses stay.
A CUDA graph can then hold the whole step, and a replay of it runs no line of Python.

With torchrl's replay buffers, `tdcopier.torchrl.GraphedLearner` does all of this around a function
that learns: see the guide page "From torchrl's script to one graph".

Without a CUDA device the same step runs on the simulated device, without a graph.
"""

import torch

import tdcopier

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
print(f"target: {device}")

# %%
# The storage, and the batch
# --------------------------
# The target of each row is a linear function of its observation, which the learner has to find.
# `pin_memory_` pins the storage in place. Keep its handle as long as the device reads rows.

ROWS, BATCH, FEATURES = 10_000, 256, 17
torch.manual_seed(0)
truth = torch.randn(FEATURES)
observation = torch.randn(ROWS, FEATURES)
storage = {"observation": observation, "target": observation @ truth, "number": torch.arange(ROWS)}
pinned = tdcopier.pin_memory_(storage, device)

index = torch.zeros(BATCH, dtype=torch.int64, device=device)
batch = {
    "observation": torch.zeros(BATCH, FEATURES, device=device),
    "target": torch.zeros(BATCH, device=device),
    "number": torch.zeros(BATCH, dtype=torch.int64, device=device),
}
weights = torch.zeros(FEATURES, device=device)
loss = torch.zeros((), device=device)


# %%
# The step
# --------
# The call reads the index on the device, in the order of the stream: the host does not wait.
# `wait()` orders the learner after the rows.


def step() -> tdcopier.AsyncCopyHandle:
    index.random_(0, ROWS)
    handle = tdcopier.start_gather(storage, index, out=batch)
    rows = handle.wait()
    error = rows["observation"] @ weights - rows["target"]
    weights.sub_(rows["observation"].t() @ error, alpha=0.2 / BATCH)
    loss.copy_(error.square().mean())
    return handle


# %%
# The graph
# ---------
# In a graph, `start_gather` becomes one kernel, which reads the rows that the index names at each
# replay. A warm-up on a side stream comes first, as for every graph.
# Keep the handle: it keeps the memory alive, and its `get()` raises the `IndexError` of a replay
# whose index had a row out of range.

if device.type == "cuda":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle = step()
    replay = graph.replay
else:
    print("skipped: the graph (no CUDA device here)")

    def replay() -> None:
        global handle
        handle = step()


for replayed in range(60):
    replay()
    if replayed % 20 == 19:
        print(f"step {replayed + 1}: loss {loss.item():.4f}")

handle.get()  # raises if an index was out of range
numbers = batch["number"].cpu()
assert torch.equal(numbers, index.cpu())
assert torch.equal(batch["observation"].cpu(), storage["observation"][numbers])
assert loss.item() < 0.1, "the learner has not learned"

# %%
# Writing back
# ------------
# The device also writes rows: here each row of the batch gets its error as a priority.
# The host can read them once `get()` has returned.

priority = torch.zeros(ROWS)
with tdcopier.pin_memory_(priority, device):
    error = (batch["observation"] @ weights - batch["target"]).abs()
    tdcopier.start_scatter([error], [priority], index).get()
    print(f"{int((priority > 0).sum())} rows of {ROWS} have a priority now")

pinned.close()

"""A loop over batches of torch_geometric that tdcopier prefetches."""

from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import tdcopier


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = GCNConv(4, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, graphs: Data) -> Any:
        nodes = self.convolution(graphs.x, graphs.edge_index).relu()
        return self.head(global_mean_pool(nodes, graphs.batch, graphs.num_graphs))


def train(network: nn.Module, graphs: list[Data], device: str, epochs: int = 1) -> list[float]:
    """Train on the graphs' `y`; return the mean loss of each epoch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    means = []
    # Instead of graphs.to(device), which also changes the batch of the loader.
    with tdcopier.prefetch(DataLoader(graphs, batch_size=16), device) as batches:
        for _ in range(epochs):
            losses = []
            for batch in batches:
                loss = (network(batch) - batch.y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())  # read at the end, without a wait
            means.append(torch.stack(losses).mean().item())
    return means


def random_graph(nodes: int) -> Data:
    """Return a graph whose label is the mean of its nodes' values."""
    x = torch.randn(nodes, 4)
    edges = torch.randint(nodes, (2, 3 * nodes))
    return Data(x=x, edge_index=edges, y=x.mean().reshape(1, 1))


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    graphs = [random_graph(3 + number % 8) for number in range(256)]
    means = train(Network().to(device), graphs, device, epochs=3)
    print(f"{device}: loss {means[0]:.3f}, then {means[-1]:.3f}")


if __name__ == "__main__":
    main()

"""Recipes for graphs and detection samples give what `.to` gives, packed."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from ray_stand_ins import Rows, stand_in_for_ray
from recipe_support import assert_all_packed, recipe
from support import assert_same

# ---- torch_geometric -----------------------------------------------------------------------------


def test_the_loop_over_graphs_trains_as_the_same_loop_by_hand(device, prefetched):
    module = recipe("geometric_graphs")
    torch.manual_seed(0)
    graphs = [module.random_graph(3 + number % 5) for number in range(40)]
    network = module.Network()
    start = {name: value.clone() for name, value in network.state_dict().items()}
    ours, plain = (module.Network().to(device) for _ in range(2))
    ours.load_state_dict(start)
    plain.load_state_dict(start)

    means = module.train(ours, graphs, device, epochs=2)
    assert_all_packed(prefetched, [5] * 6)  # x, edge_index, y, batch, ptr

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for mean in means:
        losses = []
        for batch in module.DataLoader(graphs, batch_size=16):
            graph = batch.to(device)
            loss = (plain(graph) - graph.y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert mean == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert means[1] < means[0]
    # A little apart, because torch_geometric adds up messages in any order on CUDA.
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


# ---- torchvision ---------------------------------------------------------------------------------


def test_detection_samples_are_those_of_to_and_of_the_same_transform(device, prefetched):
    module = recipe("torchvision_detection")
    shapes = module.Shapes(20)
    dataset = [shapes[index] for index in range(20)]
    got = [sample for batch in module.batches(dataset, device) for sample in batch]
    assert_all_packed(prefetched, [4 * 8, 4 * 8, 4 * 4])
    for index, (sample, on_host) in enumerate(zip(got, dataset, strict=True)):
        assert on_host["image"].dtype == torch.uint8
        wanted = module.ON_DEVICE({key: leaf.to(device) for key, leaf in on_host.items()})
        assert_same(sample, wanted, str(index))
        assert sample["boxes"].canvas_size == on_host["boxes"].canvas_size == (64, 96)
        assert sample["image"].is_floating_point()
    assert [len(sample["boxes"]) for sample in got[:9]] == [1, 2, 3, 4, 5, 6, 7, 8, 1]


# ---- Ray Data ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:::ray")
@pytest.mark.parametrize("which", ["its stand-in", "ray"])
def test_batches_of_ray_data_are_its_columns_on_the_device(device, monkeypatch, which):
    rows = [{"image": np.full((2, 4), n, np.float32), "label": n % 3} for n in range(50)]
    if which == "ray":
        dataset = pytest.importorskip("ray.data").from_items(rows)
    else:
        stand_in_for_ray(monkeypatch)
        dataset = Rows(rows)
    module = recipe("ray_data")
    got = list(module.batches(dataset, device, size=16))
    assert [len(batch["label"]) for batch in got] == [16, 16, 16, 2]
    assert {batch["image"].device for batch in got} == {torch.device(device)}
    images = torch.cat([batch["image"].cpu() for batch in got])
    labels = torch.cat([batch["label"].cpu() for batch in got])
    assert torch.equal(images, torch.arange(50.0)[:, None, None].expand(50, 2, 4))
    assert labels.tolist() == [n % 3 for n in range(50)]
    if which == "ray":
        importlib.import_module("ray").shutdown()

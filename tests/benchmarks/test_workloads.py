"""The example batches match their docstrings and are the same each time."""

import pytest
import torch

from tdcopier import workloads


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_detection_batch_has_528_leaves_and_the_same_bytes_for_every_seed(seed: int) -> None:
    batch = workloads.detection_batch(seed=seed)
    assert len(workloads.leaves(batch)) == 528
    assert workloads.total_bytes(batch) == 153_152


def test_detection_batch_leaves_are_plain_contiguous_cpu_tensors() -> None:
    for path, leaf in workloads.leaves_with_paths(workloads.detection_batch()):
        assert type(leaf) is torch.Tensor, path
        assert leaf.device.type == "cpu", path
        assert leaf.is_contiguous(), path
        assert not leaf.requires_grad, path


def test_detection_batch_has_the_documented_shapes_and_dtypes() -> None:
    for sample in workloads.detection_batch(samples=3, cameras=2):
        (m, width) = sample["boxes_3d"].shape
        assert width == 7
        assert sample["class_ids_3d"].shape == sample["active_3d"].shape == (m,)
        assert sample["active_3d"].dtype is torch.bool
        for camera in sample["cameras"]:
            (n, sides) = camera["boxes"].shape
            assert sides == 4
            assert camera["class_ids"].shape == camera["active"].shape == (n,)
            assert camera["depths"].shape == (n,)
            assert camera["projection"].shape == (3, 4)
            assert camera["class_ids"].dtype is torch.int64
            assert camera["active"].dtype is torch.bool
            assert camera["boxes"].dtype is camera["depths"].dtype is torch.float32


def test_object_counts_differ_between_cameras_and_between_samples() -> None:
    batch = workloads.detection_batch()
    assert len({len(camera["boxes"]) for sample in batch for camera in sample["cameras"]}) > 50
    assert len({len(sample["boxes_3d"]) for sample in batch}) == 16


def test_boxes_have_their_corners_in_order() -> None:
    for sample in workloads.detection_batch(samples=2):
        for camera in sample["cameras"]:
            x0, y0, x1, y1 = camera["boxes"].unbind(-1)
            assert bool(((x0 <= x1) & (y0 <= y1)).all())


@pytest.mark.parametrize(
    "make", [workloads.detection_batch, workloads.flat_dict, workloads.atari_replay]
)
def test_the_same_seed_gives_the_same_values_and_another_seed_others(make) -> None:
    first, again, other = (workloads.leaves(make(seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True)
    )


def test_images_add_one_large_leaf_per_sample() -> None:
    batch = workloads.detection_batch_with_images(samples=2)
    assert [sample["images"].shape for sample in batch] == [(6, 3, 256, 704)] * 2
    assert len(workloads.leaves(batch)) == 2 * 34
    per_sample = 6 * 3 * 256 * 704
    labels = workloads.total_bytes(workloads.detection_batch())
    assert 16 * per_sample + labels == 52_057_664  # the docstring's figure for the full batch


def test_one_large_names_every_position() -> None:
    leaf = workloads.one_large(size_bytes=1024, seed=5)
    assert leaf.tolist() == list(range(5, 5 + 256))


def test_many_large_leaves_name_every_position_of_all_of_them() -> None:
    leaves = workloads.many_large(leaves=3, leaf_bytes=8, seed=5)
    assert [leaf.tolist() for leaf in leaves] == [[5, 6], [7, 8], [9, 10]]
    full = workloads.many_large()
    assert len(full) == 64
    assert {leaf.nbytes for leaf in full} == {4 << 20}


def test_an_atari_replay_batch_has_11_leaves_in_two_dicts_and_the_documented_bytes() -> None:
    batch = workloads.atari_replay()
    assert len(workloads.leaves(batch)) == 11
    assert workloads.total_bytes(batch) == 14_457_344
    pixels = [batch["pixels"], batch["next"]["pixels"]]
    assert {(leaf.shape, leaf.dtype) for leaf in pixels} == {((256, 4, 84, 84), torch.uint8)}
    assert sum(leaf.nbytes for leaf in pixels) == 2 * 7_225_344
    assert all(leaf.is_contiguous() for leaf in workloads.leaves(batch))
    assert len({leaf.untyped_storage().data_ptr() for leaf in workloads.leaves(batch)}) == 11


def test_flat_dict_has_the_asked_leaves() -> None:
    tree = workloads.flat_dict(leaves=3, floats=2)
    assert list(tree) == ["leaf_0", "leaf_1", "leaf_2"]
    assert workloads.total_bytes(tree) == 3 * 2 * 4


def test_map_tensors_keeps_containers_and_opaque_values() -> None:
    marker = object()
    one = torch.ones(2)
    tree = {"a": [one, (one, marker)], 7: "text", "none": None}
    result = workloads.map_tensors(tree, lambda leaf: leaf + 1)
    assert type(result["a"]) is list
    assert type(result["a"][1]) is tuple
    assert result["a"][1][1] is marker
    assert result[7] == "text"
    assert result["none"] is None
    assert torch.equal(result["a"][1][0], torch.full((2,), 2.0))
    assert torch.equal(one, torch.ones(2))


def test_leaves_with_paths_names_where_each_leaf_is() -> None:
    tree = {"a": [torch.zeros(1), {"b": torch.ones(1)}], "c": "opaque"}
    assert [path for path, _ in workloads.leaves_with_paths(tree)] == ["['a'][0]", "['a'][1]['b']"]


def test_leaves_are_the_tensors_themselves() -> None:
    leaf = torch.zeros(1)
    assert workloads.leaves([(leaf,)])[0] is leaf

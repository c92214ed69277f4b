"""DTensors are parked and copied by their local part, and saved as shards. One process, gloo."""

from __future__ import annotations

import pytest
from support import run_python

pytestmark = pytest.mark.sim

SETTING = """
    import warnings
    warnings.simplefilter("ignore")
    import tempfile
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import tdcopier
    from tdcopier import sim

    sim.enable()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    values = torch.arange(200_000.0)
    local = values.to("sim")
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(init_device_mesh("cpu", (1,)), (Shard(0),), tensor_meta=meta)
    tensor = torch.nn.Parameter(DTensor(local, spec, requires_grad=False))
"""


def test_a_dtensor_is_parked_by_its_local_part():
    code = """
    local = tensor._local_tensor
    parked = tdcopier.park({"d": [tensor]})
    try:
        address = local.untyped_storage().data_ptr()
    except RuntimeError:  # from torch 2.13 on
        address = 0
    assert address == 0
    parked.resume()
    assert tensor._local_tensor is local
    assert torch.equal(local.detach().cpu(), values)
    dist.destroy_process_group()
    print("done")
    """
    assert run_python(SETTING + code).strip() == "done"


def test_a_snapshot_of_a_dtensor_is_a_dtensor_on_the_host_that_is_saved_as_its_shard():
    code = """
    got = tdcopier.snapshot({"d": tensor}).get()["d"]
    assert type(got) is DTensor
    assert got._local_tensor.device.type == "cpu"
    assert torch.equal(got.to_local(), values)
    stager = tdcopier.checkpoint.SnapshotStager()
    with tempfile.TemporaryDirectory() as folder:
        saved = dcp.async_save({"d": tensor}, checkpoint_id=folder, async_stager=stager)
        getattr(saved, "upload_completion", saved).result()
        found = {"d": torch.zeros_like(values)}
        dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["d"], values)
    stager.close()
    dist.destroy_process_group()
    print("done")
    """
    assert run_python(SETTING + code).strip() == "done"

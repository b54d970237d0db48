"""Meshes, `initialize`, loggers, ids of hubs, options that change nothing, kernels."""

import copy
import sys
import types
import warnings

import jax
import pytest

import twinkle_jax.twinkle as twinkle
from twinkle_jax.twinkle import (
    DeviceGroup,
    DeviceMesh,
    get_device_placement,
    get_logger,
    infra,
    kernel,
    utils,
)
from twinkle_jax.twinkle.names import construct, local_id


def test_sizes_lay_a_mesh_over_the_devices():
    mesh = DeviceMesh.from_sizes(world_size=8, dp_size=2, fsdp_size=4)
    assert mesh.world_size == 8 and mesh.data_world_size == 8
    assert mesh.jax_mesh().shape == {"data": 2, "fsdp": 4, "tensor": 1}
    mesh = DeviceMesh.from_sizes(fsdp_size=2, tp_size=2)
    assert mesh.world_size == 4 and mesh.data_world_size == 2
    assert mesh.jax_mesh().shape == {"data": 1, "fsdp": 2, "tensor": 2}
    assert DeviceMesh.from_sizes().jax_mesh() is None
    assert DeviceMesh([0, 1], ("dp",), device_type="cuda").jax_mesh().size == 2
    assert infra.mesh_of(mesh).shape["tensor"] == 2 and infra.mesh_of(mesh.jax_mesh()).size == 4


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"pp_size": 2}, "pp_size .*use fsdp_size or tp_size"),
        ({"vpp_size": 2}, "vpp_size .*use fsdp_size or tp_size"),
        ({"cp_size": 2}, "cp_size .*use tp_size"),
        ({"ulysses_size": 2}, "ulysses_size .*use tp_size"),
        ({"ep_size": 2}, "ep_size .*tp_size spreads experts"),
        ({"ep_fsdp_size": 2}, "ep_fsdp_size .*tp_size spreads experts"),
        ({"etp_size": 2}, "etp_size .*tp_size spreads experts"),
        ({"world_size": 4, "dp_size": 2}, "world_size"),
        ({"dp_size": 2 * jax.device_count()}, "world_size"),
    ],
)
def test_unsupported_sizes(sizes, named):
    with pytest.raises(ValueError, match=named):
        DeviceMesh.from_sizes(**sizes)


def test_meshes_by_ranks():
    with pytest.raises(ValueError, match="mesh_dim_names"):
        DeviceMesh([0, 1], ("dp", "tp"))
    with pytest.raises(ValueError, match="mesh"):
        DeviceMesh([2, 3], ("dp",))
    with pytest.raises(TypeError, match="xp_size"):
        DeviceMesh.from_sizes(xp_size=1)
    assert DeviceMesh.from_sizes(etp_size=1, vpp_size=None, sequence_parallel=True).world_size == 1


def test_ray_and_remote_groups_warn_once():
    groups = [DeviceGroup("model", [0, 1], "GPU"), DeviceGroup("sampler", 2, "GPU")]
    mesh = DeviceMesh.from_sizes(dp_size=2)
    with pytest.warns(UserWarning, match="mode='ray'"):
        twinkle.initialize("ray", nproc_per_node=4, groups=groups, global_device_mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twinkle.initialize("ray", groups=groups, global_device_mesh=mesh)
    text = get_device_placement()
    assert f"devices: {jax.device_count()}" in text and "dp 2" in text and "model, sampler" in text
    assert infra.mesh_of(None).size == 2
    with pytest.warns(UserWarning, match="remote_group"):
        infra.note_group("model")
    with pytest.raises(ValueError, match="mode"):
        twinkle.initialize("slurm")
    with pytest.raises(TypeError, match="notifier"):
        twinkle.initialize(notifier=print)


def test_loggers_have_one_handler(capsys):
    logger = get_logger()
    assert logger is get_logger() and len(logger.handlers) == 1
    assert twinkle.is_master()
    assert twinkle.Platform.get_platform().device_prefix() == "cpu"


def test_ids_of_hubs(tmp_path):
    assert local_id("hf://owner/name") == "owner/name"
    assert local_id(str(tmp_path)) == str(tmp_path) and local_id(tmp_path) is tmp_path


def test_ids_of_modelscope_are_found_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "modelscope", None)  # not installed
    for place in ("models/owner/name___5", "owner/other", "datasets/owner/sums"):
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"model_id .*modelscope download --model owner/name"):
        local_id("ms://owner/name.5")  # nothing in it: a download that broke off
    for place in ("models/owner/name___5", "owner/other", "datasets/owner/sums"):
        (tmp_path / place / "config.json").write_text("{}")
    assert local_id("ms://owner/name.5") == str(tmp_path / "models/owner/name___5")
    assert local_id("ms://owner/other") == str(tmp_path / "owner/other")
    assert local_id("ms://owner/sums", "dataset_id") == str(tmp_path / "datasets/owner/sums")
    with pytest.raises(ValueError, match=r"dataset_id .*--dataset owner/name\.5"):
        local_id("ms://owner/name.5", "dataset_id")
    modelscope = types.SimpleNamespace(snapshot_download=lambda name: f"/downloaded/{name}")
    monkeypatch.setitem(sys.modules, "modelscope", modelscope)
    assert local_id("ms://owner/new") == "/downloaded/owner/new"
    with pytest.raises(ValueError, match="dataset_id"):
        local_id("ms://owner/new", "dataset_id")


def test_kernels_are_none():
    with pytest.warns(UserWarning, match="liger_builtin"):
        assert kernel.liger_builtin(None) == {}
    with pytest.warns(UserWarning, match="npu_builtin"):
        assert kernel.npu_builtin(None) == {}
    assert kernel.kernelize("model", {}) == "model"
    assert not utils.Torch.is_gpu_available() and not utils.Torch.is_npu_available()
    with pytest.raises(NotImplementedError, match="mapping"):
        kernel.kernelize("model", {"norm": object()})


def test_objects_that_are_made_take_no_options():
    with pytest.raises(TypeError, match="options"):
        construct(print, "template", sep="")


def test_unknown_names_link_to_the_page():
    with pytest.raises(AttributeError, match="from_twinkle"):
        twinkle.remote_class  # noqa: B018


def test_sizes_of_axes_and_no_ranks():
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2)
    sizes = (mesh.dp_world_size, mesh.fsdp_world_size, mesh.tp_world_size, mesh.pp_world_size)
    assert sizes == (2, 2, 0, 0)  # as in Twinkle
    for name in ("dp_rank", "data_rank", "is_pp_last_rank", "get_slice"):
        with pytest.raises(AttributeError, match=f"{name}.*from_twinkle"):
            getattr(mesh, name)
    with pytest.raises(AttributeError, match="other_world_size"):
        mesh.other_world_size  # noqa: B018
    assert not hasattr(mesh, "shape") and copy.copy(mesh).sizes == mesh.sizes

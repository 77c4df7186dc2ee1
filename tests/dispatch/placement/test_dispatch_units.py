"""Dispatch units: which tensors are streamed together."""

from bigmodel.dispatch.placement.dispatch_units import NameTree, find_dispatch_units
from bigmodel.dispatch.placement.tensors import DeviceMapLookup

from ..models import Stack, stack


def names(model: Stack, device_map: dict[str, str]) -> dict[str, tuple[list[str], bool]]:
    placed = {each.name: each for each in DeviceMapLookup(device_map).tensors(model)}
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: (tensors, encloses) for name, tensors, encloses in find_dispatch_units(model, modules, placed)}


def test_a_block_is_one_unit_and_the_tensors_of_the_model_itself_are_another() -> None:
    found = names(stack(), {"": "cpu"})
    linears = [f"blocks.0.{layer}.{kind}" for layer in ("up", "down") for kind in ("weight", "bias")]
    assert found["blocks.0"] == (linears, False)
    assert found[""] == (["scale", "used"], True)


def test_every_tensor_is_in_exactly_one_unit() -> None:
    model = stack()
    inside = [name for tensors, _ in names(model, {"": "cpu"}).values() for name in tensors]
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    assert sorted(inside) == sorted(name for name, _ in every)


def test_a_block_partly_on_disk_stays_one_unit() -> None:
    assert names(stack(), {"": "cpu", "blocks.0.up": "disk"})["blocks.0"][1] is False


def test_a_module_does_not_own_the_names_of_another_with_the_same_prefix() -> None:
    tree = NameTree(["layer.1.weight", "layer.10.weight", "layer.1.norm.weight", "scale"])
    assert tree.inside("layer.1") == ["layer.1.weight", "layer.1.norm.weight"]
    assert tree.own("layer.1") == ["layer.1.weight"]
    assert tree.own("") == ["scale"]
    assert len(tree.inside("")) == 4

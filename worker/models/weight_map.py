"""Turns a model's weight-name map, which is data, into the slots that the loader fills.

A map's key is the checkpoint's name without `.weight` or `.bias`; its value is the attribute that
holds it and, after a dot, the part of a merged layer. Called by the models' `weight_slots`.
"""

from collections.abc import Mapping

from cearx.worker.weights import WeightSlot


def map_slots(owner: object, names: Mapping[str, str], prefix: str) -> dict[str, WeightSlot]:
    """Slots of `owner`'s layers under their checkpoint names; every slot must have a name."""
    slots: dict[str, WeightSlot] = {}
    for name, place in names.items():
        attribute, _, part = place.partition(".")
        layer_slots: dict[str, WeightSlot] = getattr(owner, attribute).slots()
        for local_name, slot in layer_slots.items():
            local_part, _, kind = local_name.rpartition(".")
            if local_part == part:
                slots[f"{prefix}{name}.{kind}"] = slot
    return slots

"""Which names of loaded weights are one weight of the model, and where the loaded weights do not agree with that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor, nn

from danling.utils.messages import listed
from danling.utils.tensors import canonical_name


def with_tied_names(model: nn.Module, weights: Mapping[str, object]) -> dict[str, object]:
    """Return weights with an entry for each name of a tied weight of which another name is there.

    Safetensors and `save_pretrained` of Hugging Face write one name of each. Names are those of `model.state_dict()` without prefixes of
    wrappers.
    """
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    groups = defaultdict[object, list[str]](list)
    for name, tensor in named:
        groups[id(tensor)].append(canonical_name(name))
    completed = dict(weights)
    for names in groups.values():
        given = next((name for name in names if name in weights), None)
        if given is not None:
            completed.update({name: weights[given] for name in names if name not in weights})
    # A tied buffer that no state contains would be refused as unexpected.
    persistent = {canonical_name(name) for name in model.state_dict()}
    return {
        name: value for name, value in completed.items() if name in weights or name in persistent
    }


def untied(model: nn.Module, weights: Mapping[str, object]) -> list[str]:
    """Return a sentence for each weight that the model ties and the loaded weights do not, or the other way round."""
    tied = defaultdict[int, list[str]](list)
    shared = defaultdict[tuple[int, object], list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(canonical_name(name))
    loaded = {
        name: value
        for name, value in weights.items()
        if isinstance(value, Tensor) and type(value) is Tensor
    }
    # All empty tensors have the address 0.
    for name, value in loaded.items():
        if value.numel():
            shared[value.data_ptr(), value.shape].append(name)
    found = []
    first = {name: names[0] for names in tied.values() for name in names}
    for names in tied.values():
        given = [name for name in names if name in loaded]
        if any(not loaded[given[0]].equal(loaded[name]) for name in given[1:]):
            found.append(
                f"{listed(given)} are one weight of the model, and have different values in what was loaded: those of {given[-1]!r} count."
            )
    found += [
        f"{listed(names)} are one weight in what was loaded, and several in the model, which training makes different. Tie them "
        "in __init__."
        for names in shared.values()
        if len({first[name] for name in names if name in first}) > 1
    ]
    return found

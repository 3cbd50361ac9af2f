"""The place of a rank in a run, and the domain of all processes, by themselves."""

from __future__ import annotations

import pytest
import torch

from danling.distributed import LocalDomain, Placement, world_of


class Ranks(LocalDomain):
    """A domain of several ranks that reduces nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def test_a_rank_reads_its_share_of_the_data() -> None:
    place = Placement.alike(Ranks(1, 2))
    assert place.share(trained=True) == place.share(trained=False) == (1, 2)
    assert place.data_replicas == 2


def test_training_data_is_divided_over_replica_groups_and_evaluation_is_not() -> None:
    places = [Placement.alike(Ranks(rank, 2), replica_group=(group, 3)) for group in range(3) for rank in range(2)]
    assert [place.share(trained=True) for place in places] == [(index, 6) for index in range(6)]
    assert [place.share(trained=False) for place in places] == [(0, 2), (1, 2)] * 3
    assert {place.data_replicas for place in places} == {6}


def test_several_processes_must_be_joined_by_somebody() -> None:
    assert isinstance(world_of(1, torch.device("cpu")), LocalDomain)
    with pytest.raises(
        ValueError, match=r"Expected `init_distributed` to join a process group of 2 processes. Received: none"
    ):
        world_of(2, torch.device("cpu"))

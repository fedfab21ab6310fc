"""Who holds what: every rank's shard, and one writer for each."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvhoist.adapters.vllm.ranks import Place, host_bytes_of_rank, place_of, ranks_on_node, tp_replicas
from kvhoist.errors import CapacityError, ConfigError, GeometryError, UnsupportedGeometryError
from kvhoist.messages import REPLICATED, WHOLE, Shard

MLA = None


def all_places(tp: int, heads: int | None, pp: int = 1, replicas: int | None = None) -> list[Place]:
    return [
        place_of(tp_size=tp, tp_rank=tp_rank, pp_size=pp, pp_rank=pp_rank, kv_heads=[heads], kv_tp_replicas=replicas)
        for pp_rank in range(pp)
        for tp_rank in range(tp)
    ]


@pytest.mark.parametrize(
    ("tp", "heads", "shards", "writers"),
    [
        (1, 8, ["0/1"], [0]),
        (1, 1, ["0/1"], [0]),
        (1, MLA, ["0/1"], [0]),
        (2, 8, ["0/2", "1/2"], [0, 1]),
        (2, 2, ["0/2", "1/2"], [0, 1]),
        (2, 1, ["replicated"] * 2, [0]),
        (2, MLA, ["replicated"] * 2, [0]),
        (4, 8, ["0/4", "1/4", "2/4", "3/4"], [0, 1, 2, 3]),
        (4, 2, ["0/2", "0/2", "1/2", "1/2"], [0, 2]),
        (4, 1, ["replicated"] * 4, [0]),
        (4, MLA, ["replicated"] * 4, [0]),
        (8, 8, [f"{i}/8" for i in range(8)], list(range(8))),
        (8, 2, ["0/2"] * 4 + ["1/2"] * 4, [0, 4]),
        (8, 1, ["replicated"] * 8, [0]),
        (8, MLA, ["replicated"] * 8, [0]),
    ],
)
def test_shards_and_writers_of_one_stage(tp: int, heads: int | None, shards: list[str], writers: list[int]) -> None:
    places = all_places(tp, heads)
    assert [str(place.shard) for place in places] == shards
    assert [place.rank for place in places if place.persists] == writers
    assert [(place.rank, place.num_ranks) for place in places] == [(rank, tp) for rank in range(tp)]


@pytest.mark.parametrize(
    ("tp", "heads", "shards", "writers"),
    [
        (1, 8, ["0/2", "1/2"], [0, 1]),
        (1, MLA, ["0/2", "1/2"], [0, 1]),
        (2, 8, ["0/4", "1/4", "2/4", "3/4"], [0, 1, 2, 3]),
        (4, 2, ["0/4", "0/4", "1/4", "1/4", "2/4", "2/4", "3/4", "3/4"], [0, 2, 4, 6]),
        (4, 1, ["0/2"] * 4 + ["1/2"] * 4, [0, 4]),
        (4, MLA, ["0/2"] * 4 + ["1/2"] * 4, [0, 4]),
    ],
)
def test_stages_hold_other_layers_and_are_never_replicas(
    tp: int, heads: int | None, shards: list[str], writers: list[int]
) -> None:
    places = all_places(tp, heads, pp=2)
    assert [str(place.shard) for place in places] == shards
    assert [place.rank for place in places if place.persists] == writers
    assert [place.rank for place in places] == list(range(2 * tp))


def test_every_shard_has_exactly_one_writer_and_every_part_is_held() -> None:
    for tp, pp, heads in product([1, 2, 4, 8], [1, 2, 3], [1, 2, 4, 8, 16, MLA]):
        places = all_places(tp, heads, pp)
        writers = Counter(place.shard for place in places if place.persists)
        assert set(writers) == {place.shard for place in places}
        assert set(writers.values()) == {1}
        numbered = [shard for shard in writers if shard != REPLICATED]
        assert sorted(numbered) == [Shard(rank, len(writers)) for rank in range(len(numbered))]
        assert (REPLICATED in writers) == (tp * pp > 1 and len(writers) == 1)


def test_one_rank_holds_the_whole() -> None:
    assert place_of(tp_size=1, tp_rank=0, kv_heads=[8]) == Place(0, 1, WHOLE, True)


def test_what_vllm_says_of_replicas_counts_where_it_knows() -> None:
    """0.32 knows of MLA's replicas and leaves attention's heads at 1."""
    assert tp_replicas(8, [MLA], 8) == 8
    assert tp_replicas(8, [MLA], 1) == 1  # a layer of the group is cut
    assert tp_replicas(8, [MLA], 2) == 2
    assert tp_replicas(8, [2], 1) == 4
    assert tp_replicas(8, [8], 1) == 1


def test_a_draft_model_whose_heads_are_cut_makes_its_group_cut() -> None:
    assert tp_replicas(8, [MLA, 8]) == 1
    assert tp_replicas(8, [2, 4]) == 2
    assert tp_replicas(4, [1, MLA]) == 4
    assert tp_replicas(6, [2, 3]) == 1


@pytest.mark.parametrize(("dcp", "pcp", "name"), [(2, 1, "decode"), (1, 2, "prefill"), (4, 4, "decode")])
def test_context_parallelism_is_refused(dcp: int, pcp: int, name: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=f"{name} context parallelism is not served yet"):
        place_of(tp_size=4, tp_rank=0, kv_heads=[8], dcp_size=dcp, pcp_size=pcp)


@pytest.mark.parametrize(
    ("tp", "heads", "replicas", "message"),
    [
        (4, [6], None, "do not divide over the tensor parallel ranks"),
        (6, [4], None, "do not divide over the tensor parallel ranks"),
        (4, [], None, "it is not known"),
        (4, [MLA], 3, "it is not known"),
    ],
)
def test_heads_that_do_not_divide_are_refused(
    tp: int, heads: list[int | None], replicas: int | None, message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        tp_replicas(tp, heads, replicas)


@pytest.mark.parametrize("bad", [{"tp_rank": 2}, {"tp_rank": -1}, {"pp_rank": 1}, {"tp_size": 0}, {"pp_size": 0}])
def test_ranks_outside_of_their_sizes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        place_of(**{"tp_size": 2, "tp_rank": 0, "kv_heads": [8]} | bad)


def test_a_nodes_host_memory_is_divided_over_all_ranks_of_all_its_engines() -> None:
    assert ranks_on_node(world_size=8, nodes_per_engine=1, engines_on_node=1) == 8
    assert ranks_on_node(world_size=16, nodes_per_engine=2, engines_on_node=1) == 8
    assert ranks_on_node(world_size=2, nodes_per_engine=1, engines_on_node=4) == 8
    assert host_bytes_of_rank(64 << 30, 8) == 8 << 30
    assert host_bytes_of_rank(100, 3) == 33


def test_memory_that_does_not_reach_and_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CapacityError, match="does not reach for all ranks"):
        host_bytes_of_rank(3, 4)
    with pytest.raises(ConfigError, match="host_bytes is out of range"):
        host_bytes_of_rank(0, 4)
    with pytest.raises(GeometryError, match="do not divide over its nodes"):
        ranks_on_node(world_size=6, nodes_per_engine=4, engines_on_node=1)
